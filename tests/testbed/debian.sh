# debian.sh: what image.sh and newest.sh share, sourced by both: an apt of our own, and kernels out of their packages.
# Expects $work, an empty directory.

shopt -s inherit_errexit
export PATH=$PATH:/usr/sbin:/sbin # depmod, debugfs
# bookworm's key ring has the keys of later releases too.
arch=amd64 keyring=/usr/share/keyrings/debian-archive-keyring.gpg

say() { printf 'testbed: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# our_apt COMMAND...: an apt that knows the mirror this machine is configured for, and the suites given to use_suites.
our_apt() { APT_CONFIG="$work/apt/apt.conf" "$@"; }

# use_suites SUITE...
use_suites() {
	[ "$(dpkg --print-architecture)" = $arch ] || die "the test bed is made on Debian $arch only"
	mirror=$(apt-get indextargets --format '$(LABEL)|$(COMPONENT)|$(REPO_URI)' 'Created-By: Packages' | sed -n 's/^Debian|main|//p' | head -n 1)
	[ -n "$mirror" ] || die "apt knows no mirror of Debian (no source with the label Debian): add one to /etc/apt, then apt-get update"
	[ -f $keyring ] || die "no $keyring: install debian-archive-keyring"
	mkdir -p "$work"/apt/{lists/partial,cache/archives/partial,empty}
	local s
	for s in "$@"; do echo "deb [arch=$arch signed-by=$keyring] $mirror $s main"; done >"$work/apt/sources.list"
	cat >"$work/apt/apt.conf" <<-END
		Dir::Etc::sourcelist "$work/apt/sources.list";
		Dir::Etc::sourceparts "$work/apt/empty";
		Dir::Etc::preferencesparts "$work/apt/empty";
		Dir::State::Lists "$work/apt/lists";
		Dir::Cache "$work/apt/cache";
		Acquire::Languages "none";
		Acquire::Retries "3";
		Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
		APT::Sandbox::User "root";
	END
}

# depends PACKAGE=VERSION: the names of the packages that it depends on.
depends() { our_apt apt-cache show "$1" | sed -n 's/^Depends: //p' | head -n 1 | tr ',|' '\n\n' | sed 's/^ *//; s/ .*//'; }

# fetch_kernel VERSION INTO: of the cloud kernel of that package version, INTO/vmlinuz-RELEASE and INTO/modules/RELEASE with the
# modules that a test can ask for; prints RELEASE. Newer packages are split in four, of which the image is an empty one.
fetch_kernel() {
	local version=$1 into=$2 debs image package release vmlinuz
	debs=$(mktemp -d "$work/kernel.XXXXXX")
	image=$(depends "linux-image-cloud-$arch=$version" | grep "^linux-image-[0-9]") || die "linux-image-cloud-$arch $version names no kernel"
	release=${image#linux-image-}
	for package in "$image" $(depends "$image=$version" | grep -Fx -e "linux-base-$release" -e "linux-binary-$release" -e "linux-modules-$release"); do
		(cd "$debs" && our_apt apt-get -qq download "$package=$version") || die "download $package $version: see above"
	done
	for package in "$debs"/*.deb; do
		dpkg-deb -x "$package" "$debs/x"
		basename "$package" >>"$into/versions"
	done
	for vmlinuz in "$debs/x/boot/vmlinuz-$release" "$debs/x/usr/lib/modules/$release/vmlinuz"; do
		[ ! -f "$vmlinuz" ] || mv "$vmlinuz" "$into/vmlinuz-$release"
	done
	[ -f "$into/vmlinuz-$release" ] || die "the packages of $release have no vmlinuz where one is looked for"
	mkdir -p "$into/modules"
	mv "$debs"/x/{usr/,}lib/modules/"$release" "$into/modules/" 2>/dev/null || [ -d "$into/modules/$release" ] || die "$release has no modules"
	# The rest is 100 MB of drivers.
	local wanted='/(overlayfs|fuse|erofs|squashfs|block|net/(netfilter|bridge|ipv4|ipv6|802|llc|core|sched|tls|packet)|drivers/net/(tun|veth|dummy|macvlan|virtio_net|net_failover)|drivers/block/(loop|virtio_blk)|drivers/(virtio|char)|crypto|lib|fs/(autofs|nls|netfs))'
	(cd "$into/modules/$release" && rm -f System.map config && find kernel -name '*.ko*' | grep -Ev "$wanted" | xargs -r rm -f &&
		find kernel -type d -empty -delete)
	echo "$release"
}
