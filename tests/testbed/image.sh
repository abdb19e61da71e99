#!/bin/bash
# image.sh DIR GUESTDIR: make DIR/{root.img,vmlinuz-6.1,vmlinuz-6.12,versions} from Debian packages, and install the host's
# tools where they are missing. Called by the testbed program, which knows DIR by the hash of this file and of GUESTDIR.
#
# Root is needed for nothing but installing the tools (through sudo, if you are not root): QEMU 10, mmdebstrap, e2fsprogs,
# uidmap. The image itself is made in a user namespace.
set -euo pipefail

dir=$1 guest=$2
arch=amd64 suite=bookworm backports=bookworm-backports
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

say() { printf 'testbed: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

[ "$(dpkg --print-architecture)" = $arch ] || die "the test bed is made on Debian $arch only"

work=$(mktemp -d "${TMPDIR:-/var/tmp}/testbed.XXXXXX")
chmod 755 "$work"
as_root=() in_userns=()
if [ "$(id -u)" -ne 0 ]; then
	as_root=(sudo)
	# The image's files belong to many users: all of them are subordinate ids of ours.
	in_userns=(unshare --user --map-root-user --map-auto --)
fi
trap '"${in_userns[@]}" rm -rf --one-file-system -- "$work"' EXIT

# --- an apt of our own: the mirror is the one that this machine is configured for, the suites are ours

mirror=$(apt-get indextargets --format '$(LABEL)|$(COMPONENT)|$(REPO_URI)' 'Created-By: Packages' | sed -n 's/^Debian|main|//p' | head -n 1)
[ -n "$mirror" ] || die "apt knows no mirror of Debian (no source with the label Debian): add one to /etc/apt, then apt-get update"
[ -f $keyring ] || die "no $keyring: install debian-archive-keyring"

mkdir -p "$work"/apt/{lists/partial,cache/archives/partial,empty}
for s in $suite $backports; do echo "deb [arch=$arch signed-by=$keyring] $mirror $s main"; done >"$work/apt/sources.list"
cat >"$work/apt/apt.conf" <<END
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
our_apt() { APT_CONFIG="$work/apt/apt.conf" "$@"; }
our_apt apt-get -qq update

# --- tools of the host

installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null || true)" = installed ]; }
missing=()
for p in mmdebstrap e2fsprogs uidmap kmod; do installed $p || missing+=("$p"); done
# bookworm's QEMU 7.2 crashes guests under load (CMPXCHG16B in software emulation).
if ! qemu-system-x86_64 --version 2>/dev/null | grep -Eq 'version [1-9][0-9]+\.'; then
	missing+=({qemu-system-x86,qemu-system-common,qemu-system-data,seabios}/$backports)
fi
if [ ${#missing[@]} -gt 0 ]; then
	say "installing Debian packages: ${missing[*]}"
	[ ${#as_root[@]} -eq 0 ] || command -v sudo >/dev/null || die "not root and no sudo: install these yourself, then run this again"
	"${as_root[@]}" env APT_CONFIG="$work/apt/apt.conf" DEBIAN_FRONTEND=noninteractive \
		apt-get -qq install -y --no-install-recommends "${missing[@]}" >"$work/install.log" 2>&1 </dev/null ||
		{ cat "$work/install.log" >&2; die "installing packages: see above"; }
fi

# --- kernels

# newest SUITE: the package that linux-image-cloud-amd64 stands for there.
newest() { our_apt apt-cache show "linux-image-cloud-$arch/$1" | sed -n 's/^Depends: \(linux-image-[^ ]*\).*/\1/p' | head -n 1; }
mkdir "$work/kernels" "$work/out"
say "fetching kernels"
for s in $suite $backports; do
	package=$(newest $s)
	[ -n "$package" ] || die "no cloud kernel in $s"
	(cd "$work/kernels" && our_apt apt-get -qq download "$package/$s")
done
for deb in "$work"/kernels/*.deb; do
	dpkg-deb -x "$deb" "$work/kernels/x"
	echo "$(basename "$deb")"
done >"$work/out/versions"
for image in "$work"/kernels/x/boot/vmlinuz-*; do
	release=${image##*/vmlinuz-}
	cp "$image" "$work/out/vmlinuz-$(cut -d. -f1,2 <<<"$release")"
done
for v in 6.1 6.12; do [ -f "$work/out/vmlinuz-$v" ] || die "Debian's $suite and $backports no longer have a kernel $v"; done
# Only the modules that a test can ask for: the rest is 100 MB of drivers.
wanted='/(overlayfs|fuse|erofs|squashfs|net/(netfilter|bridge|ipv4|ipv6|802|llc|core|sched|tls|packet)|drivers/net/(tun|veth|dummy|macvlan|virtio_net|net_failover)|drivers/block/(loop|virtio_blk)|drivers/(virtio|char)|crypto|lib|fs/(autofs|nls|netfs))'
for m in "$work"/kernels/x/lib/modules/*; do
	(cd "$m" && find kernel -name '*.ko*' | grep -Ev "$wanted" | xargs -r rm -f)
done

# --- the root file system

say "making the root file system"
packages=systemd-sysv,dbus-user-session,libpam-systemd,uidmap,iproute2,procps,kmod,python3-minimal,busybox-static
mode=unshare
[ "$(id -u)" -ne 0 ] || mode=root
mmdebstrap --quiet --variant=minbase --mode=$mode --architectures=$arch --keyring=$keyring --include=$packages \
	--aptopt='Acquire::Languages "none"' --aptopt='Acquire::Retries "3"' \
	--dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
	--customize-hook='chroot "$1" useradd --create-home --uid 1000 --shell /bin/bash dev' \
	--customize-hook='chroot "$1" dpkg-query -W >"$1/var/lib/testbed-packages"' \
	--format=tar $suite "$work/root.tar" "$mirror"

cat >"$work/assemble.sh" <<'END'
set -euo pipefail
work=$1 guest=$2
root=$work/root
mkdir "$root"
tar -C "$root" --numeric-owner --exclude='./dev/*' -xf "$work/root.tar"
mkdir -p "$root/usr/lib/modules"
cp -a --no-preserve=ownership "$work"/kernels/x/lib/modules/* "$root/usr/lib/modules/"
for m in "$root"/usr/lib/modules/*; do depmod --basedir "$root/usr" --moduledir lib/modules "${m##*/}" 2>/dev/null || depmod --basedir "$root" "${m##*/}"; done
install -m 755 "$guest"/testbed-{init,agent,as} "$root/usr/sbin/"
cat "$root/var/lib/testbed-packages" >>"$work/out/versions"
# bookworm's useradd gives subordinate ids.
grep -q '^dev:100000:65536$' "$root/etc/subuid" && grep -q '^dev:100000:65536$' "$root/etc/subgid"

units=$root/etc/systemd/system
mkdir -p "$units/multi-user.target.wants" "$units/user@.service.d" "$root/var/lib/systemd/linger"
install -m 644 "$guest/testbed.service" "$units/"
ln -sf ../testbed.service "$units/multi-user.target.wants/"
install -m 644 "$guest/delegate.conf" "$units/user@.service.d/"
touch "$root/var/lib/systemd/linger/dev"
for u in getty@tty1.service serial-getty@ttyS0.service serial-getty@hvc0.service apt-daily.timer apt-daily-upgrade.timer \
	dpkg-db-backup.timer e2scrub_all.timer fstrim.timer e2scrub_reap.service systemd-firstboot.service; do
	ln -sf /dev/null "$units/$u"
done
echo testbed >"$root/etc/hostname"
printf '127.0.0.1 localhost testbed\n::1 localhost\n' >"$root/etc/hosts"
: >"$root/etc/fstab"
echo uninitialized >"$root/etc/machine-id"
# A gigabyte to work in; the file is sparse.
uuid=5a4db0cd-0000-4000-8000-000000000001
mke2fs -q -t ext4 -O ^has_journal -m 0 -L root -U $uuid -E hash_seed=$uuid,lazy_itable_init=1 \
	-d "$root" "$work/out/root.img" $(($(du -sm "$root" | cut -f1) * 12 / 10 + 1024))M >/dev/null
END
"${in_userns[@]}" bash "$work/assemble.sh" "$work" "$guest"
qemu-system-x86_64 --version | head -n 1 >>"$work/out/versions"

mkdir -p "$(dirname "$dir")"
rm -rf "$dir"
cp -r --sparse=always "$work/out" "$dir.partial.$$"
mv "$dir.partial.$$" "$dir"
say "made $dir ($(du -sm "$dir" | cut -f1) MB)"
