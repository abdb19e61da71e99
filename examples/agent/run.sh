#!/bin/sh
# Runs the examples with a model, or those that are named:
#   run.sh [DOMAIN...] -- [FLAGS OF sandboxd agent bench]
#   run.sh music poster -- --llm_name qwen3-coder --llm_base_url http://localhost:8000/v1
#   run.sh -- --llm replay:          with recorded turns in place of a model
set -eu
here=$(cd "$(dirname "$0")" && pwd)
domains=
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    domains="$domains $1"
    shift
done
[ $# -eq 0 ] || shift
if [ -z "$domains" ]; then
    for task in "$here"/*/config.yaml; do
        domains="$domains $(basename "$(dirname "$task")")"
    done
fi
status=0
for domain in $domains; do
    "${SANDBOXD:-sandboxd}" agent bench --task "$here/$domain" "$@" || status=$?
done
exit $status
