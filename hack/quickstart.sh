#!/bin/bash
# quickstart.sh: what `make quickstart` shows, after the build. Everything it makes lies in one directory that is removed
# at the end, whatever happens; the daemon is its own, on its own socket.
set -euo pipefail
cd "$(dirname "$0")/.."

# Not /tmp, which may be a small file system in memory. Root's sandboxes run as high ids that must be able to pass.
work=$(mktemp -d -p "${QUICKSTART_DIR:-/var/tmp}" sandboxd-quickstart-XXXXXX)
chmod 755 "$work"
export SANDBOXD_SOCKET=$work/run/api.sock
sandboxd=$PWD/bin/sandboxd
daemon=

finish() {
	local status=$?
	trap - EXIT
	if [ -n "$daemon" ] && kill -0 "$daemon" 2>/dev/null; then
		"$sandboxd" shutdown --delete || kill -TERM "$daemon"
		wait "$daemon" || true
	fi
	if [ $status -ne 0 ] && [ -s "$work/daemon.log" ]; then
		echo "the daemon said:" >&2
		tail -n 40 "$work/daemon.log" >&2
	fi
	# Layers belong to subordinate ids: only root of a user namespace that maps them can remove them.
	rm -rf "$work" 2>/dev/null || unshare --map-auto --user --map-root-user rm -rf "$work" 2>/dev/null ||
		unshare --user --map-root-user rm -rf "$work" || status=1
	exit $status
}
trap finish EXIT
trap 'exit 130' INT TERM

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
show() { printf '$ sandboxd %s\n' "${*@Q}" >&2; "$sandboxd" "$@"; }

say "1. The daemon, as $(id -un), without Docker"
"$sandboxd" serve --data-dir "$work/data" --runtime-dir "$work/run" --socket "$SANDBOXD_SOCKET" >"$work/daemon.log" 2>&1 &
daemon=$!
for _ in $(seq 150); do
	kill -0 "$daemon" 2>/dev/null || { echo "the daemon ended at its start" >&2; exit 1; }
	"$sandboxd" ps >/dev/null 2>&1 && break
	sleep 0.2
done
"$sandboxd" ps >/dev/null
echo "answers on $SANDBOXD_SOCKET"

say "2. A program in a sandbox of the host image"
show run -- python3 -c 'print("hello from a sandbox")'
status=0
show run -- sh -c 'grep -E "^(Seccomp|NoNewPrivs):" /proc/self/status; echo "routes: $(sed 1d /proc/net/route | wc -l)"; ls -A /home; exit 3' || status=$?
echo "exit code $status: the program's own"
[ $status -eq 3 ]

say "3. A whole agent run; the model's turns are replayed from a recording, every command is really executed"
show agent run --llm replay:examples/quickstart/trajectory.json --input_dir examples/quickstart/input --output_dir "$work/output" >"$work/answer"

say "The answer"
cat "$work/answer"
cmp "$work/answer" examples/quickstart/answer.txt
find "$work"/output/*/ -type f -printf '  %P\n' | sort

say "What isolated it"
show create --json | python3 -c '
import json, sys
enforced = json.load(sys.stdin)["enforced"]
for name, value in enforced.items():
    if name == "missing":
        print("  missing:")
        for line in value:
            print("    -", line)
    else:
        print(f"  {name}:", ", ".join(value) if isinstance(value, list) else value)'

say "4. Stopping"
show shutdown --delete
wait "$daemon" || true
daemon=
left=$(pgrep -f -- "$work" || true)
[ -z "$left" ] || { echo "processes are left: $left" >&2; exit 1; }
echo "stopped; nothing is left. Next: sandboxd --help, sandboxd doctor, README.md"
