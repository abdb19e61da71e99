// Package functional drives the built binaries as a user's program would: through the socket and
// the command line.
//
// Every test starts a daemon of its own on directories of its own. When the test ends the daemon
// is shut down and the harness checks that no process, mount, namespace or cgroup of it is left.
package functional
