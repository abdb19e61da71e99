package attack

import (
	"errors"
	"os"
	goruntime "runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// int80getpid enters the kernel through the 32-bit gate.
func int80getpid() uint32

func processorControl() []Attack {
	return []Attack{
		{"iopl", Filter, func() error { return raw(unix.SYS_IOPL, 3, 0, 0) }},
		{"ioperm", Filter, func() error { return raw(unix.SYS_IOPERM, 0x80, 1, 1) }},
		{"modify-ldt", Filter, func() error { return raw(unix.SYS_MODIFY_LDT, 0, 0, 0) }},
		{"int80-abi", Filter, func() error {
			return survives(func() error {
				if pid := int80getpid(); int(pid) != os.Getpid() {
					return errors.New("the 32-bit entry does not answer")
				}
				return nil
			})
		}},
		{"x32-abi", Filter, func() error {
			return survives(func() error { return raw(0x40000000|unix.SYS_GETPID, 0, 0, 0) })
		}},
	}
}

// survives tries what libseccomp ends the calling thread for, and only that: the others would wait
// for it for ever.
func survives(try func() error) error {
	goruntime.GOMAXPROCS(4) // the dead thread keeps one
	var outcome atomic.Pointer[error]
	go func() {
		goruntime.LockOSThread()
		err := try()
		outcome.Store(&err)
	}()
	for range 20 {
		_ = unix.Nanosleep(&unix.Timespec{Nsec: 50e6}, nil) // not the runtime's: its timers may be the dead thread's
		if err := outcome.Load(); err != nil {
			return *err
		}
	}
	return errors.New("the thread was ended")
}
