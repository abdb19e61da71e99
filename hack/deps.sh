#!/bin/bash
# deps.sh PACKAGE...: install the Debian packages that are missing, and say which. Silent when there is nothing to do.
set -euo pipefail
# shellcheck source=apt.sh
. "$(dirname "$0")/apt.sh"

missing=()
for package in "$@"; do
	state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
	[ "$state" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

echo "installing Debian packages: ${missing[*]}"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
	command -v sudo >/dev/null || { echo "not root and no sudo: install these yourself, then run this again" >&2; exit 1; }
	as_root=(sudo)
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
as_root+=(env LC_ALL=C DEBIAN_FRONTEND=noninteractive)
{
	patient "${as_root[@]}" apt-get update && patient "${as_root[@]}" apt-get install -y --no-install-recommends "${missing[@]}"
} >"$log" || { cat "$log" >&2; exit 1; }
