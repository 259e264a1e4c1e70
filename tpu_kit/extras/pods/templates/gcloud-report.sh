
report() { local code=$?; [ $code -gt 128 ] || echo $code | gcloud storage cp - @@codes/"$(hostname)"; }
trap report EXIT
trap 'exit 143' TERM
