package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"syscall"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/image/build"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/snapshot"
	"github.com/sandboxd/sandboxd/internal/agents"
	"github.com/sandboxd/sandboxd/internal/guest"
	"github.com/sandboxd/sandboxd/runtime"
)

// The classes of errors that arise here. Those of the packages below stand beside them in the table.
var (
	ErrInvalid        = errors.New("invalid argument")
	ErrTooLarge       = errors.New("too large")
	ErrForbidden      = errors.New("forbidden")
	ErrNoRoute        = errors.New("no such route")
	ErrNoMethod       = errors.New("method not allowed")
	ErrNoFile         = errors.New("no such file")
	errNoProfile      = errors.New("no such profile")
	errProfileGone    = errors.New("profile is gone")
	ErrFileConflict   = errors.New("file cannot be used")
	ErrFileExists     = errors.New("file exists")
	errNotEmpty       = errors.New("directory not empty")
	errCrossing       = errors.New("not in one file system")
	errRange          = errors.New("no such range")
	ErrGone           = errors.New("sandbox is gone")
	ErrProgramMissing = errors.New("program not found")
	ErrProgramDenied  = errors.New("program not allowed")
	ErrStopping       = errors.New("the daemon is stopping")
	ErrBuild          = errors.New("build failed")
	errTooDeep        = errors.New("too many snapshots on top of one another")
	errUnreadable     = errors.New("what the sandbox has changed cannot be told")
	errPanic          = errors.New("a defect of the daemon")
)

// class says what the API makes of an error that wraps err.
type class struct {
	err    error
	code   api.Code
	hint   string
	status int // 0: the code's own
}

// classes is the one table from errors to codes. What matches nothing is internal.
var classes = []class{
	{err: errPanic, code: api.CodeInternal, hint: "the daemon's log has the stack; please report it"},
	{err: ErrTooLarge, code: api.CodeTooLarge, hint: "send less, or use the files and archive routes, which are not bounded"},
	{err: ErrInvalid, code: api.CodeInvalid},
	{err: ErrNoMethod, code: api.CodeInvalid, hint: "the Allow header lists the methods of this path", status: 405},
	{err: ErrForbidden, code: api.CodeForbidden, hint: "call as the user who runs the daemon"},
	{err: ErrNoRoute, code: api.CodeNotFound, hint: "the routes of this daemon begin with /v1/"},
	{err: ErrNoFile, code: api.CodeNotFound},
	{err: errNoProfile, code: api.CodeNotFound, hint: "sandboxd profiles lists what there is"},
	{err: errProfileGone, code: api.CodeConflict, hint: "start the daemon with the profile that the sandbox was created with: sandboxd serve --profiles"},
	{err: errNoExec, code: api.CodeNotFound, hint: "sandboxd execs SANDBOX lists what there is; one that has ended is kept for an hour if it was detached"},
	{err: ErrFileConflict, code: api.CodeConflict},
	{err: ErrFileExists, code: api.CodeExists},
	{err: errNotEmpty, code: api.CodeConflict, hint: "recursive=true removes a directory with all that is in it"},
	{err: errCrossing, code: api.CodeConflict, hint: "only a rename within one file system, and of what the image has not, is a move; run mv or cp in the sandbox"},
	{err: errRange, code: api.CodeInvalid, hint: "the header Content-Range says how long the file is", status: 416},
	{err: image.ErrReference, code: api.CodeInvalid, hint: "a reference is like registry/repository:tag, a platform like linux/amd64"},
	{err: image.ErrNotFound, code: api.CodeNotFound, hint: "sandboxd images lists what is stored; pull what is not: sandboxd pull REFERENCE"},
	{err: image.ErrInUse, code: api.CodeConflict, hint: "sandboxd ps lists the sandboxes; rmi --force takes the name away and leaves the image to prune"},
	{err: image.ErrRegistry, code: api.CodeRegistry, hint: "check the reference, the registry's address and your credentials"},
	{err: image.ErrInvalid, code: api.CodeImage, hint: "the image is broken or hostile; pull it anew or choose another"},
	{err: snapshot.ErrNotFound, code: api.CodeNotFound, hint: "sandboxd snapshots lists what there is"},
	{err: snapshot.ErrExists, code: api.CodeExists, hint: "choose another name, or remove the snapshot that has it"},
	{err: errTooDeep, code: api.CodeConflict, hint: "copy what is needed into a new sandbox of the image: sandboxd cp"},
	{err: ErrBuild, code: api.CodeBuild, hint: "the output of the program, before this, says why"},
	{err: build.ErrInvalid, code: api.CodeInvalid},
	{err: ErrGone, code: api.CodeGone, hint: "create a new sandbox"},
	{err: ErrProgramMissing, code: api.CodeProgramMissing, hint: "argv[0] is looked up in the sandbox's PATH; no shell is involved"},
	{err: ErrProgramDenied, code: api.CodeProgramDenied, hint: "it must be an executable file that the user may execute"},
	{err: ErrStopping, code: api.CodeUnavailable, hint: "start it again: sandboxd serve"},
	{err: layer.ErrChanged, code: api.CodeConflict, hint: "end or pause what writes in the sandbox, or try again"},
	{err: layer.ErrInvalid, code: api.CodeConflict, hint: "the sandbox has files that no layer can have; remove them there"},
	{err: errUnreadable, code: api.CodeConflict, hint: "a sandbox can be read when it has been created, and until it is deleted"},
	{err: runtime.ErrNotFound, code: api.CodeNotFound, hint: "sandboxd ps lists what there is"},
	{err: runtime.ErrExists, code: api.CodeExists, hint: "choose another name, or delete the sandbox that has it"},
	{err: runtime.ErrPaused, code: api.CodeConflict, hint: "let it go on first: sandboxd resume, or POST /v1/sandboxes/{id}/resume"},
	{err: runtime.ErrState, code: api.CodeConflict, hint: "sandboxd ps shows the states; sandboxd start runs again what has ended"},
	{err: runtime.ErrNotEnded, code: api.CodeConflict, hint: "only a sandbox that has ended can be started; end it first: sandboxd stop"},
	{err: runtime.ErrInUse, code: api.CodeConflict, hint: "end what uses it, or ask for more; nothing was changed"},
	{err: runtime.ErrTooMany, code: api.CodeConflict, hint: "delete sandboxes that are not needed any more: sandboxd prune, or sandboxd ps and sandboxd rm"},
	{err: runtime.ErrProcesses, code: api.CodeConflict, hint: hintProcesses},
	{err: runtime.ErrUnenforceable, code: api.CodeUnenforceable, hint: "sandboxd doctor says what this host lacks; leave the limit out to run without it"},
	{err: runtime.ErrClosed, code: api.CodeUnavailable, hint: "start it again: sandboxd serve"},
	{err: runtime.ErrRootfs, code: api.CodeImage, hint: "the image is broken or hostile; choose another"},
	{err: runtime.ErrUnavailable, code: api.CodeUnavailable, hint: "the launcher is gone or busy; restart the daemon"},
	{err: agents.ErrNotFound, code: api.CodeNotFound, hint: "GET /v1/agent/runs lists what there is"},
	{err: agents.ErrTooMany, code: api.CodeConflict, hint: "wait for one to end, or allow more where the daemon is started: sandboxd serve --agent-runs N"},
	{err: agents.ErrByHand, code: api.CodeConflict, hint: "end it where it was resumed, with Ctrl-C or SIGTERM"},
	{err: agents.ErrRunning, code: api.CodeConflict, hint: "cancel it first: POST /v1/agent/runs/{run}/cancel"},
	{err: agents.ErrTooLarge, code: api.CodeTooLarge, hint: "say less in query, prompt_config, policy and extra_body"},
	{err: agents.ErrWorker, code: api.CodeInternal, hint: "the daemon's log may say why"},
	{err: context.DeadlineExceeded, code: api.CodeUnavailable, hint: "the host is overloaded; try again"},
	{err: context.Canceled, code: api.CodeUnavailable},
}

const hintProcesses = "end programs or sandboxes, or start the daemon with more processes for its user (ulimit -u), of which all sandboxes together have half; " +
	"where a pids cgroup is delegated to it no sandbox takes more than its own limit: sandboxd doctor"

// titles are the codes in words.
var titles = map[api.Code]string{
	api.CodeInvalid:        "Invalid argument",
	api.CodeTooLarge:       "Too large",
	api.CodeForbidden:      "Forbidden",
	api.CodeNotFound:       "Not found",
	api.CodeExists:         "Already exists",
	api.CodeConflict:       "Not possible in this state",
	api.CodeGone:           "Gone",
	api.CodeProgramMissing: "Program not found",
	api.CodeProgramDenied:  "Program not allowed",
	api.CodeUnenforceable:  "Cannot be enforced",
	api.CodeRegistry:       "Registry error",
	api.CodeImage:          "Image invalid",
	api.CodeBuild:          "Build failed",
	api.CodeUnavailable:    "Unavailable",
	api.CodeInternal:       "Internal error",
}

// maxDetail bounds the detail of a problem: parts of it may come from a sandbox or a registry.
const maxDetail = 2048

// ProblemOf turns an error into what the API answers.
func ProblemOf(err error) *api.Problem {
	if p, ok := errors.AsType[*api.Problem](err); ok {
		return relayed(*p)
	}
	detail := bounded(err.Error())
	c := classOf(err)
	if limit, ok := errors.AsType[layer.Exceeded](err); ok && (c.code == api.CodeImage || c.err == layer.ErrInvalid) { //nolint:errorlint // of the table
		c.hint = fmt.Sprintf("what images may have is set where the daemon is started: sandboxd serve --unpack-limits %s=N", string(limit))
	}
	if c.status == 0 {
		c.status = c.code.Status()
	}
	return &api.Problem{Code: c.code, Title: titles[c.code], Status: c.status, Detail: detail, Hint: c.hint}
}

// relayed is a problem that a process of an agent run has told of. It may have been taken over by what it reads: its words are text, and
// the rest is ours.
func relayed(p api.Problem) *api.Problem {
	if titles[p.Code] == "" {
		p.Code = api.CodeInternal
	}
	p.Status, p.Title, p.Detail, p.Hint = p.Code.Status(), bounded(p.Title), bounded(p.Detail), bounded(p.Hint)
	return &p
}

func bounded(text string) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if len(text) > maxDetail {
		text = strings.ToValidUTF8(text[:maxDetail], "") + " ..."
	}
	return text
}

// classOf looks for the class that was given last, because who gave it knew what those before were about. Errors without
// one are found by what they wrap.
func classOf(err error) class {
	if given, ok := errors.AsType[*classified](err); ok {
		err = given.class
	}
	for _, known := range classes {
		if errors.Is(err, known.err) {
			return known
		}
	}
	return class{code: api.CodeInternal, hint: "the daemon's log may say more"}
}

// classified is an error put into a class without the class's words in its text.
type classified struct{ class, err error }

func (c *classified) Error() string   { return c.err.Error() }
func (c *classified) Unwrap() []error { return []error{c.class, c.err} }

func classify(class error, err error) error { return &classified{class, err} }

func invalidf(format string, args ...any) error {
	return classify(ErrInvalid, fmt.Errorf(format, args...))
}

// inFlight is what ETOOMANYREFS means, of init or, where the sandboxes have our own uid, of ourselves.
const inFlight = "programs of this daemon's sandboxes have too many descriptors under way over Unix sockets"

// execError classifies what init says about starting a program.
func execError(argv0, cwd string, err error) error {
	var ge *guest.Error
	if errors.Is(err, syscall.ETOOMANYREFS) {
		return classify(runtime.ErrState, fmt.Errorf("start %q: %s: %w", argv0, inFlight, syscall.ETOOMANYREFS))
	}
	if !errors.As(err, &ge) {
		return err
	}
	switch {
	case ge.Stage == guest.StageCwd:
		return invalidf("enter working directory %q: %w", cwd, ge.Errno)
	case ge.Stage == guest.StageLimit && ge.Errno == syscall.EPERM:
		return invalidf("rlimits %q: above the sandbox's own limit", limitName(ge.Path))
	case ge.Stage == guest.StageLimit:
		return invalidf("rlimits %q: %w", limitName(ge.Path), ge.Errno)
	case ge.Stage == guest.StageTTY:
		return classify(runtime.ErrState, fmt.Errorf("make terminal: %w", ge.Errno))
	case ge.Stage == guest.StageRequest && !oneOf(ge.Errno, syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM):
		return invalidf("start %q: %w", argv0, ge.Errno)
	case ge.Stage != guest.StageLookup && ge.Stage != guest.StageStart && ge.Stage != guest.StageRequest:
	case oneOf(ge.Errno, syscall.ENOENT, syscall.ENOTDIR) && ge.Stage == guest.StageStart:
		return classify(ErrProgramMissing, fmt.Errorf("start %q: the program or its interpreter does not exist: %w", argv0, ge.Errno))
	case oneOf(ge.Errno, syscall.ENOENT, syscall.ENOTDIR):
		return classify(ErrProgramMissing, fmt.Errorf("find %q: %w", argv0, ge.Errno))
	case oneOf(ge.Errno, syscall.EACCES, syscall.EPERM, syscall.ENOEXEC, syscall.EISDIR, syscall.ELOOP):
		return classify(ErrProgramDenied, fmt.Errorf("execute %q: %w", argv0, ge.Errno))
	case ge.Errno == syscall.E2BIG:
		return classify(ErrTooLarge, fmt.Errorf("start %q: argv and env together: %w", argv0, ge.Errno))
	case ge.Errno == syscall.EINVAL:
		return invalidf("start %q: %w (are the user's ids mapped in this sandbox?)", argv0, ge.Errno)
	case ge.Errno == syscall.EAGAIN:
		return classify(runtime.ErrProcesses, fmt.Errorf("start %q: the sandbox, or all of them together, have as many processes as they may: %w", argv0, ge.Errno))
	case oneOf(ge.Errno, syscall.ENOMEM, syscall.ENOBUFS, syscall.EMFILE, syscall.ENFILE):
		return classify(runtime.ErrState, fmt.Errorf("start %q: a limit of the sandbox is reached: %w", argv0, ge.Errno))
	}
	return fmt.Errorf("start %q: %w", argv0, err)
}

func oneOf(errno syscall.Errno, these ...syscall.Errno) bool { return slices.Contains(these, errno) }

// fileError classifies what init says about a file.
func fileError(path string, err error) error {
	var ge *guest.Error
	switch {
	case errors.Is(err, guest.ErrNotRegular):
		return invalidf("%q: %w", path, guest.ErrNotRegular)
	case errors.Is(err, syscall.ETOOMANYREFS):
		return classify(ErrFileConflict, fmt.Errorf("%q: %s: %w", path, inFlight, syscall.ETOOMANYREFS))
	case !errors.As(err, &ge):
		return err
	case errors.Is(ge.Errno, fs.ErrNotExist):
		return classify(ErrNoFile, fmt.Errorf("%q: %w", path, ge.Errno))
	case ge.Stage == guest.StageArchive:
		return invalidf("archive for %q: entry %q: %w", path, ge.Path, ge.Errno)
	case ge.Stage == guest.StageRemove && ge.Errno == syscall.ENOTEMPTY && ge.Path == path:
		return classify(errNotEmpty, fmt.Errorf("remove %q: %w", path, ge.Errno))
	case ge.Stage == guest.StageRemove && ge.Errno == syscall.EBUSY:
		return classify(ErrFileConflict, fmt.Errorf("remove %q: %q is the root or a mount point: %w", path, ge.Path, ge.Errno))
	case ge.Stage == guest.StageMove && ge.Errno == syscall.EXDEV:
		return classify(errCrossing, fmt.Errorf("move %q: %w", path, ge.Errno))
	case ge.Stage == guest.StageMove && ge.Errno == syscall.EINVAL:
		return invalidf("move %q: a directory cannot be moved into itself: %w", path, ge.Errno)
	case ge.Stage == guest.StageMove && ge.Errno == syscall.EBUSY:
		return classify(ErrFileConflict, fmt.Errorf("move: %q is the root or a mount point: %w", path, ge.Errno))
	case ge.Errno == syscall.EEXIST:
		return classify(ErrFileExists, fmt.Errorf("%s %q: %w", ge.Stage, ge.Path, ge.Errno))
	case ge.Stage == guest.StageWatch && oneOf(ge.Errno, syscall.EMFILE, syscall.ENOSPC, syscall.ENOMEM):
		return classify(ErrFileConflict, fmt.Errorf("watch %q: there are as many watches as the sandbox, or its user on this host, may have: %w", path, ge.Errno))
	case ge.Stage == guest.StageRemove && !errors.Is(ge.Errno, fs.ErrNotExist) && ge.Path != path:
		return classify(ErrFileConflict, fmt.Errorf("remove %q: %q: %w", path, ge.Path, ge.Errno))
	case oneOf(ge.Errno, syscall.EISDIR, syscall.ENOTDIR, syscall.ELOOP, syscall.ENAMETOOLONG, syscall.EINVAL, syscall.ENXIO):
		return invalidf("%q: %w", path, ge.Errno)
	case oneOf(ge.Errno, syscall.EACCES, syscall.EPERM, syscall.EROFS, syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG,
		syscall.ETXTBSY, syscall.EBUSY, syscall.ENOTEMPTY, syscall.EMLINK, syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS):
		return classify(ErrFileConflict, fmt.Errorf("%s %q: %w", ge.Stage, path, ge.Errno))
	}
	return fmt.Errorf("%q: %w", path, err)
}
