#!/bin/bash
# Trains @@name on @@slice: each of @@hosts hosts runs this. Written by `python -m tpu_kit pod`.
set -euo pipefail
export HOME="${HOME:-/root}"
mkdir -p "$HOME/tpu_kit"@@report
cd "$HOME/tpu_kit"
cat > requirements.txt <<'END_OF_REQUIREMENTS'
@@packages
END_OF_REQUIREMENTS
cat > config.yaml <<'END_OF_CONFIG'
@@config
END_OF_CONFIG
[ -x uv/bin/uv ] || python3 -m pip install --quiet --target uv uv
[ -x env/bin/python ] || uv/bin/uv venv --quiet --seed --python 3.12 env
uv/bin/uv pip install --quiet --python env/bin/python --torch-backend cpu -r requirements.txt  # torch without CUDA
uv/bin/uv pip install --quiet --python env/bin/python --no-deps 'tpu_kit @ @@kit/archive/@@revision.tar.gz'
@@train
