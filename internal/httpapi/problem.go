package httpapi

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
)

// Classes of errors that only this face has.
var (
	errNoRoute  = errors.New("no such route")
	errNoMethod = errors.New("method not allowed")
	errRange    = errors.New("no such range")
	errPanic    = errors.New("a defect of the daemon")
)

// mapping is a line of the table: errors that wrap err have this code.
type mapping struct {
	err    error
	code   api.Code
	hint   string
	status int // 0: the code's own
}

// mappings is the one table from errors to codes. An error that matches no row is internal.
var mappings = []mapping{
	{err: errPanic, code: api.CodeInternal, hint: "the daemon's log has the stack; please report it"},
	{err: class.ErrTooLarge, code: api.CodeTooLarge, hint: "send less, or use the files and archive routes, which are not bounded"},
	{err: class.ErrInvalid, code: api.CodeInvalid},
	{err: errNoMethod, code: api.CodeInvalid, hint: "the Allow header lists the methods of this path", status: 405},
	{err: class.ErrForbidden, code: api.CodeForbidden, hint: "call as the user who runs the daemon"},
	{err: errNoRoute, code: api.CodeNotFound, hint: "the routes of this daemon begin with /v1/"},
	{err: class.ErrNoAgents, code: api.CodeNotFound, hint: "the routes of this daemon begin with /v1/"},
	{err: class.ErrNoFile, code: api.CodeNotFound},
	{err: class.ErrNoProfile, code: api.CodeNotFound, hint: "sandboxd profiles lists what there is"},
	{err: class.ErrProfileGone, code: api.CodeConflict, hint: "start the daemon with the profile that the sandbox was created with: sandboxd serve --profiles"},
	{err: class.ErrNoExec, code: api.CodeNotFound, hint: "sandboxd execs SANDBOX lists what there is; one that has ended is kept for an hour if it was detached"},
	{err: class.ErrNoContext, code: api.CodeNotFound, hint: "sandboxd context ls SANDBOX lists what there is"},
	{err: class.ErrContext, code: api.CodeConflict, hint: "run the interpreter by itself to see why: sandboxd exec SANDBOX python3 -c 1"},
	{err: class.ErrFileConflict, code: api.CodeConflict},
	{err: class.ErrFileExists, code: api.CodeExists},
	{err: class.ErrNotEmpty, code: api.CodeConflict, hint: "recursive=true removes a directory with all that is in it"},
	{err: class.ErrCrossing, code: api.CodeConflict, hint: "only a rename within one file system, and of what the image has not, is a move; run mv or cp in the sandbox"},
	{err: errRange, code: api.CodeInvalid, hint: "the header Content-Range says how long the file is", status: 416},
	{err: class.ErrReference, code: api.CodeInvalid, hint: "a reference is like registry/repository:tag, a platform like linux/amd64"},
	{err: class.ErrNoImage, code: api.CodeNotFound, hint: "sandboxd images lists what is stored; pull what is not: sandboxd pull REFERENCE"},
	{err: class.ErrImageInUse, code: api.CodeConflict, hint: "sandboxd ps lists the sandboxes; rmi --force takes the name away and leaves the image to prune"},
	{err: class.ErrRegistry, code: api.CodeRegistry, hint: "check the reference, the registry's address and your credentials"},
	{err: class.ErrImage, code: api.CodeImage, hint: "the image is broken or hostile; pull it anew or choose another"},
	{err: class.ErrNoSnapshot, code: api.CodeNotFound, hint: "sandboxd snapshots lists what there is"},
	{err: class.ErrSnapshotExists, code: api.CodeExists, hint: "choose another name, or remove the snapshot that has it"},
	{err: class.ErrTooDeep, code: api.CodeConflict, hint: "copy what is needed into a new sandbox of the image: sandboxd cp"},
	{err: class.ErrBuild, code: api.CodeBuild, hint: "the output of the program, before this, says why"},
	{err: class.ErrNoLanguage, code: api.CodeNoLanguage, hint: "GET /v1/languages names for each language a Dockerfile of images/ that has it; sandboxd build makes the image"},
	{err: class.ErrLibraries, code: api.CodeLibraries, hint: "without a network, give library_dir: a directory of the sandbox with the packages"},
	{err: class.ErrRefused, code: api.CodeRefused, hint: "findings has the lines; sandboxd docs code-policy explains policies and the hook"},
	{err: class.ErrDockerfile, code: api.CodeInvalid},
	{err: class.ErrGone, code: api.CodeGone, hint: "create a new sandbox"},
	{err: class.ErrProgramMissing, code: api.CodeProgramMissing, hint: "argv[0] is looked up in the sandbox's PATH; no shell is involved"},
	{err: class.ErrProgramDenied, code: api.CodeProgramDenied, hint: "it must be an executable file that the user may execute"},
	{err: class.ErrStopping, code: api.CodeUnavailable, hint: "start it again: sandboxd serve"},
	{err: class.ErrLayerChanged, code: api.CodeConflict, hint: "end or pause what writes in the sandbox, or try again"},
	{err: class.ErrLayer, code: api.CodeConflict, hint: "the sandbox has files that no layer can have; remove them there"},
	{err: class.ErrUnreadable, code: api.CodeConflict, hint: "a sandbox can be read when it has been created, and until it is deleted"},
	{err: class.ErrNoSandbox, code: api.CodeNotFound, hint: "sandboxd ps lists what there is"},
	{err: class.ErrExists, code: api.CodeExists, hint: "choose another name, or delete the sandbox that has it"},
	{err: class.ErrPaused, code: api.CodeConflict, hint: "let it go on first: sandboxd resume, or POST /v1/sandboxes/{id}/resume"},
	{err: class.ErrState, code: api.CodeConflict, hint: "sandboxd ps shows the states; sandboxd start runs again what has ended"},
	{err: class.ErrNotEnded, code: api.CodeConflict, hint: "only a sandbox that has ended can be started; end it first: sandboxd stop"},
	{err: class.ErrNoNetwork, code: api.CodeConflict, hint: "create a sandbox with a network: --network egress:POLICY"},
	{err: class.ErrShared, code: api.CodeConflict, hint: "name the sandbox that owns the network in this request: its policy, ports and flows are for both"},
	{err: class.ErrNoOwner, code: api.CodeConflict, hint: "start the owner: sandboxd start; or ask for a network of its own: --network egress:POLICY"},
	{err: class.ErrPort, code: api.CodeConflict, hint: "choose another port of the host, or 0 for one that is free"},
	{err: class.ErrNoPort, code: api.CodeConflict, hint: "start a server in the sandbox that listens on this port of 127.0.0.1 or 0.0.0.0"},
	{err: class.ErrGateway, code: api.CodeUnavailable, hint: "the daemon's log says why the gateway does not run; it is started again"},
	{err: class.ErrNoSecret, code: api.CodeNotFound, hint: "sandboxd secret ls lists what there is"},
	{err: class.ErrManySecrets, code: api.CodeConflict, hint: "remove one that is not needed any more: sandboxd secret rm"},
	{err: class.ErrSecretOfFile, code: api.CodeConflict, hint: "change it in the file and start the daemon again, or choose another name"},
	{err: class.ErrNoVolume, code: api.CodeNotFound, hint: "sandboxd volume ls lists what there is"},
	{err: class.ErrVolumeExists, code: api.CodeExists, hint: "choose another name, or remove the volume that has it: sandboxd volume rm"},
	{err: class.ErrVolumeInUse, code: api.CodeConflict, hint: "delete the sandboxes that have it first: sandboxd rm"},
	{err: class.ErrVolumeMounted, code: api.CodeConflict, hint: "stop the sandboxes that have it first, or wait for the request that uses it"},
	{err: class.ErrVolumeNotEmpty, code: api.CodeConflict, hint: "import to a volume of another name, or remove this one first"},
	{err: class.ErrManyVolumes, code: api.CodeConflict, hint: "remove some that are not needed: sandboxd volume prune"},
	{err: class.ErrVolumeRoom, code: api.CodeConflict, hint: "ask for a smaller size, or remove volumes; the host's operator chooses the limit: sandboxd serve --volume-limit"},
	{err: class.ErrNoNamed, code: api.CodeNotFound, hint: "sandboxd network ls lists what there is; sandboxd network create makes one"},
	{err: class.ErrNamedExists, code: api.CodeExists, hint: "choose another name, or remove the network that has it: sandboxd network rm"},
	{err: class.ErrNamedInUse, code: api.CodeConflict, hint: "delete the sandboxes that are in it first, or disconnect them: sandboxd network ls, sandboxd rm"},
	{err: class.ErrNamedRunning, code: api.CodeConflict, hint: "stop the sandbox first: sandboxd stop"},
	{err: class.ErrManyNamed, code: api.CodeConflict, hint: "remove some that are not needed: sandboxd network prune"},
	{err: class.ErrArchive, code: api.CodeInvalid, hint: "send a tar, plain or compressed, that fits into the volume"},
	{err: class.ErrInUse, code: api.CodeConflict, hint: "end what uses it, or ask for more; nothing was changed"},
	{err: class.ErrTooMany, code: api.CodeConflict, hint: "delete sandboxes that are not needed any more: sandboxd prune, or sandboxd ps and sandboxd rm"},
	{err: class.ErrNoDisk, code: api.CodeConflict, hint: hintDisk},
	{err: class.ErrNoRoom, code: api.CodeConflict, hint: hintRoom},
	{err: class.ErrProcesses, code: api.CodeConflict, hint: hintProcesses},
	{err: class.ErrUnenforceable, code: api.CodeUnenforceable, hint: "sandboxd doctor says what this host lacks; leave the limit out to run without it"},
	{err: class.ErrClosed, code: api.CodeUnavailable, hint: "start it again: sandboxd serve"},
	{err: class.ErrMount, code: api.CodeInvalid, hint: "sandboxd docs files says which directories of the host a sandbox may have"},
	{err: class.ErrRootfs, code: api.CodeImage, hint: "the image is broken or hostile; choose another"},
	{err: class.ErrUnavailable, code: api.CodeUnavailable, hint: "the launcher is gone or busy; restart the daemon"},
	{err: class.ErrNoRun, code: api.CodeNotFound, hint: "GET /v1/agent/runs lists what there is"},
	{err: class.ErrTooManyRuns, code: api.CodeConflict, hint: "wait for one to end, or allow more where the daemon is started: sandboxd serve --agent-runs N"},
	{err: class.ErrRunByHand, code: api.CodeConflict, hint: "end it where it was resumed, with Ctrl-C or SIGTERM"},
	{err: class.ErrRunActive, code: api.CodeConflict, hint: "cancel it first: POST /v1/agent/runs/{run}/cancel"},
	{err: class.ErrRunTooLarge, code: api.CodeTooLarge, hint: "say less in query, prompt_config, policy and extra_body"},
	{err: class.ErrRunWorker, code: api.CodeInternal, hint: "the daemon's log may say why"},
	{err: context.DeadlineExceeded, code: api.CodeUnavailable, hint: "the host is overloaded; try again"},
	{err: context.Canceled, code: api.CodeUnavailable},
}

const hintDisk = "free some: sandboxd prune --older-than 0, sandboxd images prune, sandboxd snapshots rm; " +
	"the host's operator chooses the reserve: sandboxd serve --disk-reserve"

const hintRoom = "ask for lower limits, or end sandboxes that are not needed: sandboxd ps, sandboxd stop; " +
	"the host's operator can give all more: sandboxd serve --memory, --pids, --overcommit"

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
	api.CodeNoLanguage:     "Language not found",
	api.CodeLibraries:      "Installation failed",
	api.CodeRefused:        "Code refused",
	api.CodeUnavailable:    "Unavailable",
	api.CodeInternal:       "Internal error",
}

// maxDetail bounds the detail of a problem: parts of it may come from a sandbox or a registry.
const maxDetail = 2048

// ProblemOf returns the problem document of an error.
func ProblemOf(err error) *api.Problem {
	if p, ok := errors.AsType[*api.Problem](err); ok {
		return relayed(*p)
	}
	detail := bounded(err.Error())
	c := classOf(err)
	if limit := class.ExceededLimit(err); limit != "" && (c.code == api.CodeImage || c.err == class.ErrLayer) { //nolint:errorlint // of the table
		c.hint = fmt.Sprintf("what images may have is set where the daemon is started: sandboxd serve --unpack-limits %s=N", limit)
	}
	if c.status == 0 {
		c.status = c.code.Status()
	}
	p := &api.Problem{Code: c.code, Title: titles[c.code], Status: c.status, Detail: detail, Hint: c.hint}
	if r, ok := errors.AsType[*class.Refusal](err); ok {
		p.Findings = r.Findings
	}
	return p
}

// relayed returns a problem that a process of an agent run has reported. The process may have been
// taken over through the text it reads: its words are kept as bounded text, all else is set here.
func relayed(p api.Problem) *api.Problem {
	if titles[p.Code] == "" {
		p.Code = api.CodeInternal
	}
	p.Status, p.Title, p.Detail, p.Hint = p.Code.Status(), bounded(p.Title), bounded(p.Detail), bounded(p.Hint)
	p.Findings = nil
	return &p
}

func bounded(text string) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if len(text) > maxDetail {
		text = strings.ToValidUTF8(text[:maxDetail], "") + " ..."
	}
	return text
}

// classOf returns the table's line for an error. The outermost mark decides, because the code that
// set it knew the inner ones; an error without a mark is found by the errors that it wraps.
func classOf(err error) mapping {
	err = class.Marked(err)
	for _, known := range mappings {
		if errors.Is(err, known.err) {
			return known
		}
	}
	return mapping{code: api.CodeInternal, hint: "the daemon's log may say more"}
}
