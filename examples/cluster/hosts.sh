#!/usr/bin/env bash
# longtail over hosts that you reach with ssh. The first is the head and runs the driver.
#   bash hosts.sh run.toml 10.0.0.1 10.0.0.2 10.0.0.3
# Each has the same environment (PATH finds `ray` and `longtail`). SSH names another way to run a
# command on a host, WORKERS the number of workers; without it there is one on each host.
set -euo pipefail
config=$1
shift
first=$1
SSH=${SSH:-ssh}

umask 077
token=$(mktemp)
head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$token"
own='RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$HOME/.longtail-token RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0'

stop() {
  for host in "$@"; do
    $SSH "$host" 'ray stop --force >/dev/null 2>&1; rm -f $HOME/.longtail-token' </dev/null || true
  done
}
trap 'stop "$@"; rm -f "$token"' EXIT

for host in "$@"; do
  $SSH "$host" 'umask 077 && cat >$HOME/.longtail-token' <"$token"
  if [ "$host" = "$first" ]; then
    join="--head --port=6379 --include-dashboard=false"
  else
    join="--address=$first:6379"
  fi
  $SSH "$host" "$own ray start $join --node-ip-address=$host ${RAY_OPTIONS:-}" </dev/null
done
$SSH "$first" "$own longtail train $config --cluster.address $first:6379 \
  --cluster.workers ${WORKERS:-$#}" </dev/null
