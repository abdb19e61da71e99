// Package class holds the classes of errors that the service returns. A face maps each class to a
// code of its own protocol and imports nothing below the service for it.
package class

import (
	"errors"
	"fmt"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image"
	"github.com/sandboxd/sandboxd/image/build"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/snapshot"
	"github.com/sandboxd/sandboxd/internal/agents"
	"github.com/sandboxd/sandboxd/internal/egress"
	"github.com/sandboxd/sandboxd/internal/secrets"
	"github.com/sandboxd/sandboxd/internal/volume"
	"github.com/sandboxd/sandboxd/runtime"
)

// Classes of errors that the service itself finds.
var (
	ErrInvalid        = errors.New("invalid argument")
	ErrTooLarge       = errors.New("too large")
	ErrForbidden      = errors.New("forbidden")
	ErrNoFile         = errors.New("no such file")
	ErrFileConflict   = errors.New("file conflict")
	ErrFileExists     = errors.New("file exists")
	ErrNotEmpty       = errors.New("directory not empty")
	ErrCrossing       = errors.New("not in one file system")
	ErrNoProfile      = errors.New("no such profile")
	ErrProfileGone    = errors.New("profile is gone")
	ErrNoExec         = errors.New("no such exec")
	ErrNoContext      = errors.New("no such context")
	ErrContext        = errors.New("context does not start")
	ErrGone           = errors.New("sandbox is gone")
	ErrProgramMissing = errors.New("program not found")
	ErrProgramDenied  = errors.New("program not allowed")
	ErrNoLanguage     = errors.New("the sandbox does not have the language")
	ErrLibraries      = errors.New("libraries cannot be installed")
	ErrRefused        = errors.New("code is refused")
	ErrStopping       = errors.New("the daemon is stopping")
	ErrBuild          = errors.New("build failed")
	ErrNoDisk         = errors.New("the disk is short")
	ErrTooDeep        = errors.New("too many snapshots on top of one another")
	ErrUnreadable     = errors.New("changes of the sandbox are not readable")
	ErrNoAgents       = errors.New("this daemon hosts no agent runs")
	ErrPort           = errors.New("port cannot be published")
	ErrNoPort         = errors.New("no server on the port")
	ErrSecretOfFile   = errors.New("the secret is of the daemon's file")
	ErrShared         = errors.New("the network belongs to another sandbox")
	ErrArchive        = errors.New("archive is not usable")
	ErrNoNamed        = errors.New("no such network")
	ErrNamedExists    = errors.New("network exists")
	ErrNamedInUse     = errors.New("network is in use")
	ErrManyNamed      = errors.New("too many networks")
	ErrNamedRunning   = errors.New("a running sandbox's networks cannot be changed so")
)

// Classes of the packages below the service.
var (
	ErrReference      = image.ErrReference
	ErrNoImage        = image.ErrNotFound
	ErrImageInUse     = image.ErrInUse
	ErrRegistry       = image.ErrRegistry
	ErrImage          = image.ErrInvalid
	ErrNoSnapshot     = snapshot.ErrNotFound
	ErrSnapshotExists = snapshot.ErrExists
	ErrDockerfile     = build.ErrInvalid
	ErrLayerChanged   = layer.ErrChanged
	ErrLayer          = layer.ErrInvalid
	ErrNoSandbox      = runtime.ErrNotFound
	ErrExists         = runtime.ErrExists
	ErrPaused         = runtime.ErrPaused
	ErrState          = runtime.ErrState
	ErrNotEnded       = runtime.ErrNotEnded
	ErrInUse          = runtime.ErrInUse
	ErrNoNetwork      = runtime.ErrNoNetwork
	ErrNoOwner        = runtime.ErrNoOwner
	ErrGateway        = egress.ErrUnavailable
	ErrTooMany        = runtime.ErrTooMany
	ErrNoRoom         = runtime.ErrNoRoom
	ErrProcesses      = runtime.ErrProcesses
	ErrUnenforceable  = runtime.ErrUnenforceable
	ErrClosed         = runtime.ErrClosed
	ErrRootfs         = runtime.ErrRootfs
	ErrUnavailable    = runtime.ErrUnavailable
	ErrMount          = runtime.ErrMount
	ErrNoRun          = agents.ErrNotFound
	ErrTooManyRuns    = agents.ErrTooMany
	ErrRunByHand      = agents.ErrByHand
	ErrRunActive      = agents.ErrRunning
	ErrRunTooLarge    = agents.ErrTooLarge
	ErrRunWorker      = agents.ErrWorker
	ErrNoSecret       = secrets.ErrNotFound
	ErrManySecrets    = secrets.ErrTooMany
	ErrNoVolume       = volume.ErrNotFound
	ErrVolumeExists   = volume.ErrExists
	ErrVolumeInUse    = volume.ErrInUse
	ErrVolumeMounted  = runtime.ErrVolumeInUse
	ErrVolumeNotEmpty = runtime.ErrVolumeNotEmpty
	ErrManyVolumes    = volume.ErrTooMany
	ErrVolumeRoom     = volume.ErrNoRoom
)

// Refusal is the reason of a class [ErrRefused]: findings of policies, or of the hook.
type Refusal struct {
	Findings []api.CodeFinding
	Reason   string
}

func (r *Refusal) Error() string { return "code is refused: " + r.Reason }

// marked is an error with a class whose words are not in its text.
type marked struct{ class, err error }

func (m *marked) Error() string   { return m.err.Error() }
func (m *marked) Unwrap() []error { return []error{m.class, m.err} }

// Mark puts err into a class. The outermost mark counts: the caller that set it knew the inner
// ones.
func Mark(class, err error) error { return &marked{class, err} }

// Invalidf returns an error of the class [ErrInvalid].
func Invalidf(format string, args ...any) error {
	return Mark(ErrInvalid, fmt.Errorf(format, args...))
}

// Marked returns the class of the outermost mark, or err itself if it has none.
func Marked(err error) error {
	if m, ok := errors.AsType[*marked](err); ok {
		return m.class
	}
	return err
}

// ExceededLimit returns the name of the unpack limit that err is about, empty if it is about none.
func ExceededLimit(err error) string {
	limit, _ := errors.AsType[layer.Exceeded](err)
	return string(limit)
}

// Clip shortens text of a request that an error repeats.
func Clip(s string) string {
	if len(s) > 200 {
		return s[:200] + "..."
	}
	return s
}
