// Package osthread runs functions that change what belongs to a thread: its namespaces, ids,
// capabilities or securebits.
//
// A goroutine that never unlocks its thread ends the thread with itself, and the change with it.
// The main thread is an exception: Go's runtime keeps it, with all that the goroutine left. Its
// namespaces are then the ones that /proc/PID/ns of the process shows, and a mount or a sandbox's
// UTS namespace lives on with it. So none of these functions runs there.
package osthread

import (
	goruntime "runtime"

	"golang.org/x/sys/unix"
)

// Run calls f on a thread that ends when f returns, and returns its error. Nothing else runs on the
// thread. A program that f starts has the thread's state; a goroutine that it starts does not.
func Run(f func() error) error { return run(f, isMain) }

func isMain() bool { return unix.Gettid() == unix.Getpid() }

func run(f func() error, unfit func() bool) error {
	done := make(chan error, 1)
	go func() {
		goruntime.LockOSThread()
		if unfit() {
			// Held meanwhile, so that the next goroutine gets another one.
			err := run(f, unfit)
			goruntime.UnlockOSThread()
			done <- err
			return
		}
		done <- f() // and never unlocked
	}()
	return <-done
}
