#!/bin/bash
# fuzz.sh TIME TAGS: run every fuzz target of the tree for TIME, one after the other.
set -euo pipefail
fuzztime=$1 tags=$2
grep -rl --include='*_test.go' '^func Fuzz' . | xargs -r -n1 dirname | sort -u | while read -r package; do
	sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' "$package"/*_test.go | sort | while read -r target; do
		echo "== $package $target"
		go test -tags "$tags" -run '^$' -fuzz "^$target\$" -fuzztime "$fuzztime" -parallel 2 "$package" </dev/null
	done
done
