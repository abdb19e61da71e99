#!/bin/bash
# suite.sh ARGUMENTS...: runs tests/*.test with the arguments, as whoever it is run as, and keeps each one's output.
set -uo pipefail
export SANDBOXD_BIN=$PWD/bin SANDBOXD_TEST_REQUIRE=userns,subids,cgroup
if [ "$USER" = root ]; then SANDBOXD_TEST_REQUIRE+=,root; else SANDBOXD_TEST_REQUIRE+=,user; fi
results=/results/$USER
mkdir -p "$results"
code=0
for test in tests/*.test; do
	name=$(basename "$test" .test)
	echo "-- $name as $USER"
	"$test" "$@" 2>&1 | tee "$results/$name.log" || code=1
done
exit $code
