#!/bin/bash
# fuzz.sh TIME TAGS: run every fuzz target of the tree for TIME, one after the other. They are found, not listed.
set -euo pipefail
fuzztime=$1 tags=$2
found=$(go list -tags "$tags" -f '{{$p := .}}{{range .TestGoFiles}}{{$p.ImportPath}} {{$p.Dir}}/{{.}}{{"\n"}}{{end}}{{range .XTestGoFiles}}{{$p.ImportPath}} {{$p.Dir}}/{{.}}{{"\n"}}{{end}}' ./... |
	while read -r package file; do
		sed -n "s|^func \(Fuzz[A-Za-z0-9_]*\)(.*|$package \1|p" "$file"
	done)
said=$(mktemp)
trap 'rm -f "$said"' EXIT
while read -r package target <&3; do
	echo "== $package $target"
	# Minimizing takes a minute by default, for every input that is new, in which nothing is tried.
	go test -buildvcs=false -tags "$tags" -run '^$' -fuzz "^$target\$" -fuzztime "$fuzztime" -fuzzminimizetime 2s -parallel 2 "$package" 2>&1 | tee "$said" ||
		# All that is said of a target that was busy when its time was up: a fault of Go before 1.27, golang.org/issue/75804.
		{ grep -q '^    context deadline exceeded$' "$said" && ! grep -q 'Failing input' "$said"; }
done 3<<<"$found"
