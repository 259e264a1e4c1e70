#!/bin/bash
# Keeps @@slice until the run has ended, asks for it again when it is lost, and deletes it at the end.
# Until then the slice costs. If this was stopped, run it again.
set -uo pipefail
cd "$(dirname "$0")"
ended() { [ "$(wc -w <<< "$codes")" -eq @@hosts ] || [[ $codes =~ [1-9] ]]; }
for restart in $(seq 0 @@restarts); do
  if ! @@resource describe @@at > /dev/null 2>&1; then
    gcloud storage rm @@objects > /dev/null 2>&1
    @@resource create @@at --node-id=@@name \
      --accelerator-type=@@slice --runtime-version=@@image@@spot \
      --metadata-from-file=startup-script=start.sh || exit 1
  fi
  while sleep "${POLL_SECONDS:-60}"; do
    state=$(@@resource describe @@at --format='value(state.state)')
    codes=$(gcloud storage cat @@objects 2> /dev/null | xargs)
    echo "$(date) restart $restart: ${state:-unknown}${codes:+; exit codes of hosts: $codes}"
    if ended || [ "$state" = SUSPENDED ] || [ "$state" = FAILED ]; then break; fi
  done
  @@resource delete @@at --force --quiet || exit 1
  if [[ " $codes " =~ " "[12]" " ]]; then exit 1; fi
  if ended && ! [[ $codes =~ [1-9] ]]; then exit 0; fi
done
exit 75
