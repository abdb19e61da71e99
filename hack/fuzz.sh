#!/bin/bash
# fuzz.sh TIME TAGS: run every fuzz target of the tree for TIME, one after the other. They are found, not listed.
set -euo pipefail
fuzztime=$1 tags=$2
found=$(go list -tags "$tags" -f '{{$p := .}}{{range .TestGoFiles}}{{$p.ImportPath}} {{$p.Dir}}/{{.}}{{"\n"}}{{end}}{{range .XTestGoFiles}}{{$p.ImportPath}} {{$p.Dir}}/{{.}}{{"\n"}}{{end}}' ./... |
	while read -r package file; do
		sed -n "s|^func \(Fuzz[A-Za-z0-9_]*\)(.*|$package \1|p" "$file"
	done)
while read -r package target <&3; do
	echo "== $package $target"
	# Minimizing takes a minute by default, for every input that is new, in which nothing is tried.
	go test -buildvcs=false -tags "$tags" -run '^$' -fuzz "^$target\$" -fuzztime "$fuzztime" -fuzzminimizetime 2s -parallel 2 "$package"
done 3<<<"$found"
