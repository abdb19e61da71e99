#!/bin/bash
# Measures how comments are written, per 1,000 comment lines of the tracked Go files below the given
# paths (the whole tree by default), and fails where a figure is over its limit. The limits are those
# of prose in well-kept Go projects: see "Comments" in CONTRIBUTING.md.
#
#   hack/voice.sh [-v] [PATH ...]     -v also prints every line that counts, with its place
set -euo pipefail

verbose=
if [ "${1:-}" = -v ]; then verbose=yes; shift; fi
cd "$(git rev-parse --show-toplevel)"

# One comment line each, as "file:line:text". Directives and embedded test data are no prose.
comments=$(mktemp)
trap 'rm -f "$comments"' EXIT
git ls-files -co --exclude-standard -- "${@:-.}" | grep '\.go$' | grep -v '/testdata/' | while read -r file; do
	if [ -e "$file" ]; then echo "$file"; fi
done | xargs -r grep -HnP '(^|\s)// ' |
	sed -E 's|^([^:]*:[0-9]+:).*(^\|[[:space:]])// |\1|; s|^([^:]*:[0-9]+:)[[:space:]]*// |\1|' > "$comments"
lines=$(wc -l < "$comments")
if [ "$lines" = 0 ]; then echo "no comment lines"; exit 0; fi

failed=
# check NAME LIMIT PATTERN counts the matches of PATTERN in the text of comments.
check() {
	local count figure
	count=$(cut -d: -f3- "$comments" | grep -oiP "$3" | wc -l || true)
	figure=$(awk -v c="$count" -v n="$lines" 'BEGIN { printf "%.1f", c * 1000 / n }')
	printf '%-28s %6s per 1,000 comment lines, limit %s\n' "$1" "$figure" "$2"
	if [ "$verbose" ]; then grep -iP "^[^:]*:\d+:.*?$3" "$comments" || true; fi
	if awk -v f="$figure" -v l="$2" 'BEGIN { exit !(f > l) }'; then failed=yes; fi
}
check 'who, whom' 2 '\b(who|whom)\b'
check 'nobody, somebody' 2 '\b(nobody|somebody|anybody|everybody)\b'
check 'what is, what it, what that' 10 \
	'\bwhat (is|it|that|was|are|were|has|have|had|they|we|the|a|an|its|there|can|cannot|must|may|should|will|would|does|do|did)\b'

# A comment line counts with its indentation, a tab as one column, as the linter counts it.
long=$(git ls-files -co --exclude-standard -- "${@:-.}" | grep '\.go$' | grep -v '/testdata/' | while read -r file; do
	if [ -e "$file" ]; then echo "$file"; fi
done | xargs -r grep -HnP '^\s*// .{98,}' | grep -vP '://\S{60,}' | awk -F: '
	{ text = $0; sub(/^[^:]*:[0-9]+:/, "", text); if (length(text) > 100) print }' || true) # grep finds none
count=$(printf '%s' "$long" | grep -c . || true)
printf '%-28s %6s, limit 0\n' 'lines over 100 columns' "$count"
if [ "$verbose" ] && [ "$count" != 0 ]; then printf '%s\n' "$long"; fi
[ "$count" = 0 ] && [ -z "$failed" ]
