# shellcheck shell=bash
# apt.sh: what deps.sh and debs.sh share, sourced by both.

# patient COMMAND...: an apt-get, once more as long as somebody else has one of apt's locks: a machine that has just been started upgrades
# itself for minutes. It prints what the last one said.
patient() {
	local said end=$((SECONDS + 900))
	until said=$("$@" 2>&1 </dev/null); do
		[[ $said == *"E: Could not get lock "* ]] && ((SECONDS < end)) || { printf '%s\n' "$said"; return 1; }
		sleep 5
	done
	printf '%s\n' "$said"
}
