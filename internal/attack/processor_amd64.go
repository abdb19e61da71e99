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

func processorAround() []Attack {
	return []Attack{
		// Before Linux 4.8 a tracer could change the number of a call after the filter had seen it.
		{"ptrace-rewrites-call", Filter, rewriteCall},
	}
}

// rewriteCall traces a child that asks for its pid, and makes unshare of the call at its entry.
func rewriteCall() error {
	goruntime.LockOSThread() // a tracer is a thread; never unlocked
	pid, err := waiting(unix.SYS_GETPID)
	if err != nil {
		return err
	}
	if err := unix.PtraceSeize(pid); err != nil {
		return errors.Join(err, end(pid))
	}
	if err := rewriteStopped(pid); err != nil {
		_ = end(pid) // it may have ended
		return err
	}
	return nil
}

// rewriteStopped lets a stopped child go on, and returns the error of the call that it has made.
func rewriteStopped(pid int) error {
	const stopOption, exitKill = unix.PTRACE_O_TRACESYSGOOD, unix.PTRACE_O_EXITKILL
	if err := unix.PtraceInterrupt(pid); err != nil {
		return err
	}
	for options, rewritten := false, false; ; {
		var status unix.WaitStatus
		if _, err := unix.Wait4(pid, &status, unix.WALL, nil); err != nil {
			return err
		}
		if status.Exited() {
			if code := status.ExitStatus(); code != 0 {
				return unix.Errno(code)
			}
			if !rewritten {
				return errors.New("its call was not seen")
			}
			return nil
		}
		if !options {
			if err := unix.PtraceSetOptions(pid, stopOption|exitKill); err != nil {
				return err
			}
			options = true
			if err := unix.Kill(pid, unix.SIGCONT); err != nil {
				return err
			}
		}
		if status.Stopped() && status.StopSignal() == unix.SIGTRAP|0x80 && !rewritten {
			var regs unix.PtraceRegs
			if err := unix.PtraceGetRegs(pid, &regs); err != nil {
				return err
			}
			// At the entry rax is -ENOSYS; the call's own argument is CLONE_NEWUTS already.
			if regs.Orig_rax == unix.SYS_GETPID && int64(regs.Rax) == -int64(unix.ENOSYS) && regs.Rdi == unix.CLONE_NEWUTS {
				regs.Orig_rax = unix.SYS_UNSHARE
				if err := unix.PtraceSetRegs(pid, &regs); err != nil {
					return err
				}
				rewritten = true
			}
		}
		if err := unix.PtraceSyscall(pid, 0); err != nil {
			return err
		}
	}
}
