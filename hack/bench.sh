#!/bin/bash
# bench.sh: measure what docs/performance.md shows and write the table there, with the machine and the day.
set -euo pipefail
cd "$(dirname "$0")/.."
export SANDBOXD_BIN=$PWD/bin
mkdir -p build
go test -buildvcs=false -run '^$' -bench . -benchtime "${BENCHTIME:-300x}" -count "${COUNT:-3}" -timeout 30m ./tests/performance | tee build/bench.txt
go run -buildvcs=false ./tests/performance/table <build/bench.txt >docs/performance.md
