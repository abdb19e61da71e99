__sbx_eval() { eval "$__sbx_source"; } # on the first line, so that lines of errors are the user's
# The resident kernel of bash contexts, an argument of bash -c. Output of commands is the exec's own; messages stand in it
# behind a NUL and the key, which is the first argument (see doc.go).

# The user's code has these descriptors of its own: it may redirect its streams with exec.
exec {__sbx_in}<&0 {__sbx_out}>&1 {__sbx_err}>&2 </dev/null
BASH_ARGV0=bash
shopt -s expand_aliases
__sbx_key=$1
shift
__sbx_busy= __sbx_hit= __sbx_code= __sbx_depth=0 __sbx_count=0
# Signals that have come, until the last run's end, and those of runs that have ended; the daemon's
# count of the latter.
__sbx_ints=0 __sbx_seen=0 __sbx_passed=0 __sbx_told=0

__sbx_say() { # TYPE RUN JSON
	local LC_ALL=C
	printf '\0%s:%s %d %d\n%s' "$__sbx_key" "$1" "$2" "${#3}" "$3" >&$__sbx_out
}

# Unwinding: with extdebug, a DEBUG trap that returns 2 makes the function return. The trap is set
# for the time until the frame of the kernel is reached.
__sbx_unwind() {
	shopt -s extdebug
	set -T
	trap __sbx_step DEBUG
}

__sbx_step() {
	((${#FUNCNAME[@]} > __sbx_depth + 1)) && return 2
	__sbx_settle
	return 0
}

__sbx_settle() {
	trap - DEBUG
	shopt -u extdebug
	set +T
}

__sbx_int() {
	((__sbx_ints++))
	if [[ -n $__sbx_busy ]]; then
		__sbx_hit=1
		__sbx_unwind
	fi
}

# exit ends the run, and in a subshell that.
exit() {
	local code=${1:-$?}
	if [[ $BASHPID != "$$" || -z $__sbx_busy ]]; then
		builtin exit "$code"
	fi
	__sbx_code=$((code & 255))
	__sbx_unwind
}

__sbx_run() { # RUN INTERRUPTS CODE [NAME=VALUE]... ., with escapes of printf's %b
	local __sbx_number=$1 __sbx_i __sbx_name __sbx_value __sbx_source __sbx_status=0
	local __sbx_due=$(($2 - __sbx_told))
	for ((__sbx_i = 0; __sbx_i < 50 && __sbx_ints - __sbx_passed < __sbx_due; __sbx_i++)); do
		read -r -t 0.01 <> <(:) || : # an interrupt of the last run may still be on its way
	done
	((__sbx_seen - __sbx_passed > __sbx_due)) && __sbx_due=$((__sbx_seen - __sbx_passed))
	__sbx_passed=$((__sbx_passed + __sbx_due)) __sbx_told=$2
	((__sbx_ints < __sbx_passed)) && __sbx_ints=$__sbx_passed # one that does not come any more
	printf -v __sbx_source %b "$3"
	local -A __sbx_old=()
	local -a __sbx_unset=()
	for __sbx_i in "${@:4}"; do
		[[ $__sbx_i == . ]] && break
		printf -v __sbx_value %b "$__sbx_i"
		__sbx_name=${__sbx_value%%=*}
		[[ $__sbx_name == [A-Za-z_]*([A-Za-z0-9_]) ]] || continue
		if [[ -n ${!__sbx_name+set} ]]; then __sbx_old[$__sbx_name]=${!__sbx_name}; else __sbx_unset+=("$__sbx_name"); fi
		export "$__sbx_value"
	done
	((++__sbx_count))
	trap __sbx_int INT
	__sbx_hit= __sbx_code= __sbx_depth=${#FUNCNAME[@]} __sbx_busy=1
	if ((__sbx_ints > __sbx_passed)); then # it came before the code began
		__sbx_hit=1
	else
		__sbx_eval || __sbx_status=$?
	fi
	trap __sbx_int INT # the run's own may end the kernel
	__sbx_busy= __sbx_seen=$__sbx_ints
	__sbx_settle
	[[ -n $__sbx_code ]] && __sbx_status=$__sbx_code
	for __sbx_name in "${!__sbx_old[@]}"; do export "$__sbx_name=${__sbx_old[$__sbx_name]}"; done
	((${#__sbx_unset[@]})) && unset "${__sbx_unset[@]}"
	if [[ -n $__sbx_hit ]]; then
		__sbx_status=130
		__sbx_say x "$__sbx_number" '{"name":"KeyboardInterrupt","value":""}'
	fi
	printf '\0%s:s %d 0\n' "$__sbx_key" "$__sbx_number" >&$__sbx_err
	local __sbx_ok=true # no subshell, which a late interrupt would end
	((__sbx_status)) && __sbx_ok=false
	__sbx_say d "$__sbx_number" "{\"ok\":$__sbx_ok,\"count\":$__sbx_count,\"code\":$__sbx_status}"
}

shopt -s extglob
trap __sbx_int INT
__sbx_say h 0 "{\"protocol\":1,\"language\":\"bash\",\"version\":\"${BASH_VERSION//[^0-9.]/}\"}"
while IFS= read -r -u "$__sbx_in" __sbx_line; do
	[[ $__sbx_line == *' .' ]] || continue # cut off by the end of a daemon, or empty
	IFS=' ' read -r -a __sbx_words <<<"$__sbx_line"
	__sbx_run "${__sbx_words[@]}"
done
