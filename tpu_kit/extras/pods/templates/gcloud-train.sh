@@{secrets}for restart in $(seq 0 @@restarts); do
  code=0
  @@train || code=$?
  case $code in 0|1|2) break;; *) code=75;; esac
done
exit $code
