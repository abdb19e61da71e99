#!/bin/bash
# bench-ab.sh OLD [NEW]: compare two built trees, in turns: the binaries in OLD/bin and in NEW/bin (this tree's). It prints the
# quantiles of both in ms, the ratio of their medians and its 95 % confidence interval, and fails if an operation is certainly
# slower than 1.05 times. A quiet machine takes some minutes. As root it measures as the ordinary user of the tests.
# ITERATIONS=300 RUN=regexp of operations.
set -euo pipefail
old=$(realpath "$1/bin") new=$(realpath "${2:-$(dirname "$0")/..}/bin")
cd "$(dirname "$0")/.."
work=$(mktemp -d -p /var/tmp sandboxd-ab-XXXXXX)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
go test -buildvcs=false -c -o "$work/performance.test" ./tests/performance
mkdir "$work/old" "$work/new" "$work/tmp" "$work/run"
cp "$old"/sandboxd* "$work/old/"
cp "$new"/sandboxd* "$work/new/"
as=()
if [ "$(id -u)" -eq 0 ]; then
	user=${BENCH_USER:-sandboxd-test}
	id -u "$user" >/dev/null 2>&1 || useradd --create-home --shell /bin/sh "$user"
	chown -R "$user" "$work/tmp" "$work/run"
	as=(setpriv --reuid "$user" --regid "$user" --init-groups)
fi
cd "$work/tmp"
"${as[@]}" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME="$work/tmp" TMPDIR="$work/tmp" \
	XDG_RUNTIME_DIR="$work/run" SANDBOXD_BIN="$work/new" SANDBOXD_BIN_OLD="$work/old" "$work/performance.test" -test.run '^$' \
	-test.bench "^BenchmarkAgainst$/(${RUN:-.})" -test.benchtime "${ITERATIONS:-300}x" -test.timeout 60m | tee "$work/out" |
	awk '$1 !~ /^Benchmark/ { print > "/dev/stderr" }'
awk 'BEGIN { format = "%-18s %9s %9s %9s %9s %7s  %s\n"; printf format, "", "old p50", "new p50", "old p99", "new p99", "ratio", "95 %" }
	/^Benchmark.*old-p50-ms/ {
		for (i = 3; i < NF; i += 2) v[$(i + 1)] = $i
		sub(/^BenchmarkAgainst\//, "", $1); sub(/-[0-9]+$/, "", $1)
		verdict = v["ratio-low"] > 1.05 ? "SLOWER" : v["ratio-high"] > 1.05 ? "not certain" : ""
		bad += verdict == "SLOWER"
		printf format, $1, v["old-p50-ms"], v["new-p50-ms"], v["old-p99-ms"], v["new-p99-ms"], v["ratio"],
			sprintf("%.3f to %.3f  %s", v["ratio-low"], v["ratio-high"], verdict)
	}
	END { exit bad > 0 }' "$work/out"
