#!/bin/bash
# debs.sh DIR: fetch the Debian packages that tests/layers makes images of, and those of programs that tests/functional and
# tests/network and tests/docker run without installing them, into DIR, where they are not there yet. The packages of tests/functional
# and tests/docker, whose programs run on the host, are unpacked in DIR/unpacked. One process at a time calls it for a directory.
set -euo pipefail
umask 022 # other users read the packages
# shellcheck source=apt.sh
. "$(dirname "$0")/apt.sh"
tests=$(realpath "$(dirname "$0")/../tests")
mkdir -p "$1"
dir=$(realpath "$1")
rm -rf "$dir"/.new-* # of a run that was killed
missing=()
while read -r package; do
	[[ -z $package ]] || compgen -G "$dir/${package}_*.deb" >/dev/null || missing+=("$package")
done < <(cat "$tests"/layers/packages.txt "$tests"/{functional,network,docker}/packages.txt)
# Beside it, so that a download that is cut off is never taken for a package, nor half a tree for a whole one.
new=$(mktemp -d "$dir/.new-XXXXXX")
trap 'rm -rf "$new"' EXIT
if ((${#missing[@]})); then
	get() { (cd "$new" && apt-get -q download "${missing[@]}"); }
	# The lists may be missing, or older than what the mirror has.
	as_root=(env LC_ALL=C)
	((EUID == 0)) || as_root=(sudo -n "${as_root[@]}")
	get || { patient "${as_root[@]}" apt-get -q update && get; }
	mv "$new"/*.deb "$dir"
fi
# Once, because it takes five seconds of a processor.
cd "$dir"
debs=()
while read -r package; do
	[[ -n $package ]] || continue
	mapfile -t found < <(compgen -G "${package}_*.deb")
	debs+=("${found[-1]}")
done < <(cat "$tests"/{functional,docker}/packages.txt)
printf '%s\n' "${debs[@]}" >"$new/packages"
! cmp -s "$new/packages" unpacked/packages || exit 0
for deb in "${debs[@]}"; do
	dpkg-deb --extract "$deb" "$new"
done
rm -f unpacked/packages # first: it says that the tree is whole
rm -rf unpacked
mv -T "$new" unpacked
