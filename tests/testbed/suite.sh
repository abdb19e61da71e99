#!/bin/bash
# suite.sh FLAGS...: runs the test binaries that the file plan names, as whoever it is run as, in their places in the tree, and
# keeps what each one says and how it ends; testresult.ReadDir reads that. A line of plan is a binary's name, its directory, the
# machine that it is for (- for all) and what -test.run selects, separated by tabs.
set -uo pipefail
top=$PWD
results=/results/$USER
mkdir -p "$results/logs"
export SANDBOXD_BIN=$top/bin SANDBOXD_TEST_LOGS=$results/logs
# Nothing that a machine of ours has is skipped in silence.
export SANDBOXD_TEST_REQUIRE=userns,subids,cgroup,landlock,bed,peer
if [ "$USER" = root ]; then
	SANDBOXD_TEST_REQUIRE+=,root,account,resource
else
	SANDBOXD_TEST_REQUIRE+=,user
fi
# By what the machine was started as, not by what is found: that is for the tests.
! grep -qw testbed.flavour=systemd /proc/cmdline || SANDBOXD_TEST_REQUIRE+=,systemd
! grep -qw testbed.soak /proc/cmdline || export SANDBOXD_TEST_SOAK=yes
machine=$(tr ' ' '\n' </proc/cmdline | sed -n 's/^testbed\.machine=//p')
! [ -f "skip.$machine" ] || set -- "$@" "-test.skip=$(cat "skip.$machine")"
worst=0
while IFS=$'\t' read -r name dir only run; do
	[ "$only" = - ] || [ "$only" = "$machine" ] || continue
	echo "-- $name as $USER"
	cd "$top/tree/$dir"
	began=$EPOCHREALTIME
	# ^V marks the lines that are the testing package's own: for test2json, not for people.
	"$top/tests/$name.test" "$@" ${run:+"-test.run=$run"} 2>&1 </dev/null | tee "$results/$name.out" | sed -u 's/\x16//; /^=== NAME/d'
	code=${PIPESTATUS[0]}
	echo "$code $(awk "BEGIN { print $EPOCHREALTIME - $began }")" >"$results/$name.end"
	[ "$code" -eq 0 ] || worst=1
done <"$top/plan"
exit $worst
