package libct

// Processes and threads count for the daemon's user as well, over all sandboxes and all its other
// programs: see ceilings.go.

/*
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

// The ceiling of a user namespace for processes is the soft limit of its creator at that moment,
// and that is libcontainer's own constructor, long before Go runs. So this constructor runs
// earlier, and only in a process that is about to be a sandbox's. The launcher itself keeps all of
// the limit: its runtime ends it if no thread can be had, and with it every sandbox.
__attribute__((constructor(101))) static void sandboxd_hold_processes(void) {
	struct rlimit held;
	if (!getenv("_LIBCONTAINER_INITPIPE"))
		return;
	if (!getrlimit(RLIMIT_NPROC, &held)) {
		if (held.rlim_cur == RLIM_INFINITY)
			return; // half of it is no less
		held.rlim_cur /= 2;
		if (!setrlimit(RLIMIT_NPROC, &held))
			return;
	}
	perror("hold the processes of all sandboxes together");
	_exit(1);
}
*/
import "C"
