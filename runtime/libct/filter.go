package libct

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"
	libseccomp "github.com/seccomp/libseccomp-golang"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/guest"
)

// filters keeps what profiles' filters were compiled to: libseccomp takes a fifth of the time of a
// sandbox's start for it, and the profiles are few.
type filters struct {
	mu    sync.Mutex
	known []compiled // the last one was asked for last
}

type compiled struct {
	filter  *specs.LinuxSeccomp
	program []byte
}

// maxFilters bounds the number of kept programs: profiles that change again and again must not fill
// the memory.
const maxFilters = 16

// program returns the compiled filter for the sandbox's init to load; config is its form of
// libcontainer. It is nil if libcontainer has to: where unknown calls are not ENOSYS anyway,
// libcontainer makes those so that are newer than all it knows, with a program of its own.
func (f *filters) program(filter *specs.LinuxSeccomp, config *configs.Seccomp) ([]byte, error) {
	if config.DefaultAction != configs.Errno || config.DefaultErrnoRet == nil || *config.DefaultErrnoRet != uint(unix.ENOSYS) {
		return nil, nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	// They are compared whole: a filter that is mistaken for another one would be a hole. That takes no
	// time where they have one address, as those that launcher.Server has decoded, which never change.
	i := slices.IndexFunc(f.known, func(c compiled) bool { return reflect.DeepEqual(c.filter, filter) })
	if i < 0 {
		p, err := compile(config)
		if err != nil {
			return nil, fmt.Errorf("compile seccomp filter: %w", err)
		}
		if len(f.known) == maxFilters {
			f.known = slices.Delete(f.known, 0, 1)
		}
		f.known = append(f.known, compiled{filter, p})
		return p, nil
	}
	c := f.known[i]
	f.known = append(slices.Delete(f.known, i, i+1), c)
	return c.program, nil
}

// actions are those that a profile's filter can have (seccomp.Check).
var actions = map[configs.Action]libseccomp.ScmpAction{
	configs.Kill: libseccomp.ActKillThread, configs.KillThread: libseccomp.ActKillThread, configs.KillProcess: libseccomp.ActKillProcess,
	configs.Allow: libseccomp.ActAllow, configs.Errno: libseccomp.ActErrno,
}

func action(a configs.Action, errno *uint) (libseccomp.ScmpAction, error) {
	act, ok := actions[a]
	if !ok {
		return 0, fmt.Errorf("action %d is not one of a profile", a)
	}
	if a == configs.Errno {
		ret := uint(unix.EPERM)
		if errno != nil {
			ret = *errno
		}
		act = act.SetReturnCode(int16(ret))
	}
	return act, nil
}

var operators = map[configs.Operator]libseccomp.ScmpCompareOp{
	configs.EqualTo: libseccomp.CompareEqual, configs.NotEqualTo: libseccomp.CompareNotEqual,
	configs.GreaterThan: libseccomp.CompareGreater, configs.GreaterThanOrEqualTo: libseccomp.CompareGreaterEqual,
	configs.LessThan: libseccomp.CompareLess, configs.LessThanOrEqualTo: libseccomp.CompareLessOrEqual,
	configs.MaskEqualTo: libseccomp.CompareMaskedEqual,
}

// compile makes of a filter what libcontainer would load for it
// (TestCompiledFilterIsWhatLibcontainerLoads), as the array of instructions that seccomp(2) takes.
func compile(c *configs.Seccomp) (_ []byte, err error) {
	if len(c.Flags) > 0 || c.ListenerPath != "" {
		return nil, errors.New("flags and listeners are not for profiles")
	}
	otherwise, err := action(c.DefaultAction, c.DefaultErrnoRet)
	if err != nil {
		return nil, err
	}
	f, err := libseccomp.NewFilter(otherwise)
	if err != nil {
		return nil, err
	}
	defer f.Release()
	for _, name := range c.Architectures {
		arch, err := libseccomp.GetArchFromString(name)
		if err != nil {
			return nil, err
		}
		if err := f.AddArch(arch); err != nil {
			return nil, fmt.Errorf("architecture %s: %w", name, err)
		}
	}
	if len(c.Syscalls) > 32 {
		if err := f.SetOptimize(2); err != nil { // a tree of calls rather than a list
			return nil, fmt.Errorf("optimize: %w", err)
		}
	}
	for _, call := range c.Syscalls {
		act, err := action(call.Action, call.ErrnoRet)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", call.Name, err)
		}
		if act == otherwise {
			continue
		}
		number, err := libseccomp.GetSyscallFromName(call.Name)
		if err != nil {
			continue // libseccomp does not know it, so nothing lets it through
		}
		var conditions []libseccomp.ScmpCondition
		for _, arg := range call.Args {
			op, ok := operators[arg.Op]
			if !ok {
				return nil, fmt.Errorf("%s: unknown operator %d", call.Name, arg.Op)
			}
			condition, err := libseccomp.MakeCondition(arg.Index, op, arg.Value, arg.ValueTwo)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", call.Name, err)
			}
			conditions = append(conditions, condition)
		}
		// No two conditions are on one argument: seccomp.Check refuses that.
		if len(conditions) == 0 {
			err = f.AddRule(number, act)
		} else {
			err = f.AddRuleConditional(number, act, conditions)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", call.Name, err)
		}
	}
	fd, err := unix.MemfdCreate("filter", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make memfd: %w", err)
	}
	file := os.NewFile(uintptr(fd), "filter")
	defer file.Close() // never read again
	if err := f.ExportBPF(file); err != nil {
		return nil, err
	}
	var program bytes.Buffer
	if _, err := io.Copy(&program, io.NewSectionReader(file, 0, 1<<20)); err != nil {
		return nil, err
	}
	return program.Bytes(), nil
}

// fdFilter is the descriptor on which the sandbox's init finds its filter.
const fdFilter = 5

// initTimeout bounds the time for an init to be confined. It takes a millisecond, on a machine
// that has nothing else to do.
const initTimeout = 30 * time.Second

// A channel hands an init its filter, and its word back that it holds.
type channel struct{ launcher, init *os.File }

// handFilter takes the filter out of libcontainer's configuration if the init can load it: a
// compiled program costs neither libseccomp's work nor the encoding of some 400 rules for each
// child and each of its states. Until then only libcontainer and the init run, before it has had
// any request.
func (e *Engine) handFilter(filter *specs.LinuxSeccomp, config *configs.Config) (*channel, error) {
	program, err := e.filters.program(filter, config.Seccomp)
	if err != nil {
		return nil, err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make socket pair for its init: %w", err)
	}
	c := &channel{init: os.NewFile(uintptr(pair[1]), "filter")}
	err = unix.SetNonblock(pair[0], true) // so that a deadline can be set
	c.launcher = os.NewFile(uintptr(pair[0]), "filter")
	switch {
	case err != nil:
	case program == nil:
		_, err = c.launcher.WriteString(guest.LoadedAlready)
	default:
		config.Seccomp = nil
		_, err = c.launcher.Write(program)
	}
	if err != nil {
		c.close()
		return nil, fmt.Errorf("hand on the seccomp filter: %w", err)
	}
	return c, nil
}

// wait returns when the init reports that it is confined, or why it is not: Enforced is true from
// then on, not before. Nothing hostile has run by then; still, it reads one byte only.
func (c *channel) wait(ctx context.Context) error {
	_ = c.init.Close() // so that its end is seen
	if err := c.launcher.SetReadDeadline(time.Now().Add(initTimeout)); err != nil {
		return fmt.Errorf("wait for its init: %w", err)
	}
	defer context.AfterFunc(ctx, func() { _ = c.launcher.SetReadDeadline(time.Unix(1, 0)) })()
	var word [1]byte
	n, err := c.launcher.Read(word[:])
	switch {
	case err == nil && n == 1:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("wait for its init: %w", ctx.Err())
	case err == nil, errors.Is(err, io.EOF):
		return errors.New("its init ended before it was confined")
	}
	return fmt.Errorf("wait for its init: %w", err)
}

func (c *channel) close() {
	_, _ = c.launcher.Close(), c.init.Close()
}
