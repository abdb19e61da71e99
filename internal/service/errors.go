package service

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"syscall"

	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

// inFlight explains ETOOMANYREFS, of init or, if the sandboxes have the daemon's own uid, of the
// daemon.
const inFlight = "programs of this daemon's sandboxes have too many descriptors under way over Unix sockets"

// execError classifies what init says about starting a program.
func execError(argv0, cwd string, err error) error {
	var ge *guest.Error
	if errors.Is(err, syscall.ETOOMANYREFS) {
		return class.Mark(runtime.ErrState, fmt.Errorf("start %q: %s: %w", argv0, inFlight, syscall.ETOOMANYREFS))
	}
	if errors.Is(err, guest.ErrNoWatch) {
		return class.Mark(runtime.ErrState, fmt.Errorf("start %q: %w", argv0, err))
	}
	if !errors.As(err, &ge) {
		return err
	}
	switch {
	case ge.Stage == guest.StageCwd:
		return class.Invalidf("enter working directory %q: %w", cwd, ge.Errno)
	case ge.Stage == guest.StageLimit && ge.Errno == syscall.EPERM:
		return class.Invalidf("rlimits %q: above the sandbox's own limit", limitName(ge.Path))
	case ge.Stage == guest.StageLimit:
		return class.Invalidf("rlimits %q: %w", limitName(ge.Path), ge.Errno)
	case ge.Stage == guest.StageTTY:
		return class.Mark(runtime.ErrState, fmt.Errorf("make terminal: %w", ge.Errno))
	case ge.Stage == guest.StageRequest && !oneOf(ge.Errno, syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM):
		return class.Invalidf("start %q: %w", argv0, ge.Errno)
	case ge.Stage != guest.StageLookup && ge.Stage != guest.StageStart && ge.Stage != guest.StageRequest:
	case oneOf(ge.Errno, syscall.ENOENT, syscall.ENOTDIR) && ge.Stage == guest.StageStart:
		return class.Mark(class.ErrProgramMissing, fmt.Errorf("start %q: the program or its interpreter does not exist: %w", argv0, ge.Errno))
	case oneOf(ge.Errno, syscall.ENOENT, syscall.ENOTDIR):
		return class.Mark(class.ErrProgramMissing, fmt.Errorf("find %q: %w", argv0, ge.Errno))
	case oneOf(ge.Errno, syscall.EACCES, syscall.EPERM, syscall.ENOEXEC, syscall.EISDIR, syscall.ELOOP):
		return class.Mark(class.ErrProgramDenied, fmt.Errorf("execute %q: %w", argv0, ge.Errno))
	case ge.Errno == syscall.E2BIG:
		return class.Mark(class.ErrTooLarge, fmt.Errorf("start %q: argv and env together: %w", argv0, ge.Errno))
	case ge.Errno == syscall.EINVAL:
		return class.Invalidf("start %q: %w (are the user's ids mapped in this sandbox?)", argv0, ge.Errno)
	case ge.Errno == syscall.EAGAIN:
		return class.Mark(runtime.ErrProcesses, fmt.Errorf("start %q: the sandbox, or all of them together, have as many processes as they may: %w", argv0, ge.Errno))
	case oneOf(ge.Errno, syscall.ENOMEM, syscall.ENOBUFS, syscall.EMFILE, syscall.ENFILE):
		return class.Mark(runtime.ErrState, fmt.Errorf("start %q: a limit of the sandbox is reached: %w", argv0, ge.Errno))
	}
	return fmt.Errorf("start %q: %w", argv0, err)
}

func oneOf(errno syscall.Errno, these ...syscall.Errno) bool { return slices.Contains(these, errno) }

// fileError classifies what init says about a file.
func fileError(path string, err error) error {
	var ge *guest.Error
	switch {
	case errors.Is(err, guest.ErrNotRegular):
		return class.Invalidf("%q: %w", path, guest.ErrNotRegular)
	case errors.Is(err, syscall.ETOOMANYREFS):
		return class.Mark(class.ErrFileConflict, fmt.Errorf("%q: %s: %w", path, inFlight, syscall.ETOOMANYREFS))
	case errors.Is(err, guest.ErrNoWatch):
		return class.Mark(class.ErrFileConflict, fmt.Errorf("%q: %w", path, err))
	case !errors.As(err, &ge):
		return err
	case errors.Is(ge.Errno, fs.ErrNotExist):
		return class.Mark(class.ErrNoFile, fmt.Errorf("%q: %w", path, ge.Errno))
	case ge.Stage == guest.StageArchive:
		return class.Invalidf("archive for %q: entry %q: %w", path, ge.Path, ge.Errno)
	case ge.Stage == guest.StageRemove && ge.Errno == syscall.ENOTEMPTY && ge.Path == path:
		return class.Mark(class.ErrNotEmpty, fmt.Errorf("remove %q: %w", path, ge.Errno))
	case ge.Stage == guest.StageRemove && ge.Errno == syscall.EBUSY:
		return class.Mark(class.ErrFileConflict, fmt.Errorf("remove %q: %q is the root or a mount point: %w", path, ge.Path, ge.Errno))
	case ge.Stage == guest.StageMove && ge.Errno == syscall.EXDEV:
		return class.Mark(class.ErrCrossing, fmt.Errorf("move %q: %w", path, ge.Errno))
	case ge.Stage == guest.StageMove && ge.Errno == syscall.EINVAL:
		return class.Invalidf("move %q: a directory cannot be moved into itself: %w", path, ge.Errno)
	case ge.Stage == guest.StageMove && ge.Errno == syscall.EBUSY:
		return class.Mark(class.ErrFileConflict, fmt.Errorf("move: %q is the root or a mount point: %w", path, ge.Errno))
	case ge.Errno == syscall.EEXIST:
		return class.Mark(class.ErrFileExists, fmt.Errorf("%s %q: %w", ge.Stage, ge.Path, ge.Errno))
	case ge.Stage == guest.StageWatch && oneOf(ge.Errno, syscall.EMFILE, syscall.ENOSPC, syscall.ENOMEM):
		return class.Mark(class.ErrFileConflict, fmt.Errorf("watch %q: there are as many watches as the sandbox, or its user on this host, may have: %w", path, ge.Errno))
	case ge.Stage == guest.StageRemove && !errors.Is(ge.Errno, fs.ErrNotExist) && ge.Path != path:
		return class.Mark(class.ErrFileConflict, fmt.Errorf("remove %q: %q: %w", path, ge.Path, ge.Errno))
	case oneOf(ge.Errno, syscall.EISDIR, syscall.ENOTDIR, syscall.ELOOP, syscall.ENAMETOOLONG, syscall.EINVAL, syscall.ENXIO):
		return class.Invalidf("%q: %w", path, ge.Errno)
	case oneOf(ge.Errno, syscall.EACCES, syscall.EPERM, syscall.EROFS, syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG,
		syscall.ETXTBSY, syscall.EBUSY, syscall.ENOTEMPTY, syscall.EMLINK, syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS):
		return class.Mark(class.ErrFileConflict, fmt.Errorf("%s %q: %w", ge.Stage, path, ge.Errno))
	}
	return fmt.Errorf("%q: %w", path, err)
}

// errnoOf finds the errno of an error of package os.
func errnoOf(err error) syscall.Errno {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno
	}
	if errors.Is(err, fs.ErrNotExist) {
		return syscall.ENOENT
	}
	return syscall.EIO
}
