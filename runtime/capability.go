package runtime

import (
	"context"
	"errors"
	"io"
	"os"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// An engine may offer more than [Engine] asks for, each ability as one of the interfaces below.
// [As] finds it. Without an ability the operations that need it fail with ErrUnavailable; nothing
// else changes.

// As returns the ability T of an engine, if it has it. An engine that wraps another one offers the
// other's abilities by an Unwrap method.
func As[T any](e Engine) (T, bool) {
	for {
		if t, ok := e.(T); ok {
			return t, true
		}
		w, ok := e.(interface{ Unwrap() Engine })
		if !ok {
			var none T
			return none, false
		}
		e = w.Unwrap()
	}
}

// Differ is the ability to read the files that a sandbox has changed, whether it runs or has ended.
// Without it there are no diffs, commits, snapshots and forks, and no build that runs a program.
// Its errors are those of package image/layer where the files are to blame, and ErrNotFound for a
// sandbox without files.
type Differ interface {
	// WriteDiff writes the changes to w as an uncompressed layer, whose digest is the result's DiffID.
	// On error w has received a useless part.
	WriteDiff(ctx context.Context, req DiffRequest, w io.Writer) (DiffResult, error)
	// ListDiff calls found for every changed file, sorted as in the layer. An error of found ends it.
	ListDiff(ctx context.Context, req DiffRequest, found func(api.Change) error) (DiffResult, error)
	// StoreDiff makes a layer of the changes, under a chain id that no layer has, and returns when it
	// is complete and synced. The result's DiffID is that of the stream that WriteDiff would have
	// written. Frozen reports whether no process of the sandbox ran meanwhile. On error no layer is
	// kept.
	StoreDiff(ctx context.Context, req DiffRequest, chainID string) (result DiffResult, frozen bool, err error)
}

// DiffRequest selects the changes of a sandbox.
type DiffRequest struct {
	ID     string
	Rootfs rootfs.Source // with which it was created
	// Workspace selects the changes of the sandbox's workspace instead of those of its root. Every
	// whiteout and opaque mark is included: the directory below is not looked at.
	Workspace bool
	Layer     bool      // the changes of the uppermost layer of Rootfs, a snapshot's, against those below; without an ID
	Freeze    bool      // stop the sandbox while it is read, if it runs in a cgroup
	Latest    time.Time // times of files are cut to it; zero means as they are
	Holes     bool      // leave zeros out of the stream, which is then no image's
	Limits    DiffLimits
}

// DiffLimits bound a layer; zero means the engine's default.
type DiffLimits struct {
	Entries, Bytes           int64 // of all layers together
	BelowEntries, BelowBytes int64 // those of the layers below
	Ratio, RatioFloor        int64 // bytes out for each byte in, from RatioFloor bytes on
	Depth, Name              int   // components of a path; bytes of a component
}

// DiffResult describes a layer.
type DiffResult struct {
	DiffID      string
	Size        int64    // bytes of file contents
	Entries     int64    // number of headers
	Skipped     []string // files left out and why, a line each
	SkippedMore int64    // number of further ones
}

// DescriptorStore is the ability to keep file descriptors for the daemon after this one, so that
// detached execs survive it. Without it they end with the daemon.
type DescriptorStore interface {
	// StoreDescriptors keeps copies of 1 to 8 descriptors until they are dropped, the sandbox is
	// deleted or the engine ends. They replace those under the set's name. If the store is full it
	// fails with ErrInUse.
	StoreDescriptors(ctx context.Context, set DescriptorSet) error
	// StoredDescriptors returns copies of all sets, which the caller closes. The store keeps its own.
	StoredDescriptors(ctx context.Context) ([]DescriptorSet, error)
	// DropDescriptors ends the keeping of a set. An unknown one is no error.
	DropDescriptors(ctx context.Context, sandbox, name string) error
}

// DescriptorSet is a named set of descriptors of one sandbox.
type DescriptorSet struct {
	Sandbox, Name string // at most 32 bytes each
	Files         []*os.File
}

// Networker is the ability to run sandboxes with a network ([Spec.Network]). Each start of a
// sandbox makes new sockets. Both methods fail with ErrNotFound for a sandbox that does not run,
// and with ErrNoNetwork for one that has no network.
type Networker interface {
	// NetworkSockets returns copies of the sockets at which the sandbox's connections end. A daemon
	// asks again for those of the sandboxes that it adopts. The kernel keeps the namespace of an ended
	// sandbox until the last copy is closed.
	NetworkSockets(ctx context.Context, id string) (*NetworkSockets, error)
	// NetworkSocket makes a socket inside the sandbox's namespace, of network "tcp" or "udp", for one
	// netns.Connect to a server there. For [SocketDiag] it returns a copy of the namespace's one socket
	// for netns.Inode, or fails with ErrUnenforceable. The caller closes it.
	NetworkSocket(ctx context.Context, id, network string) (*os.File, error)
}

// SocketDiag is the network of the socket that tells of other sockets.
const SocketDiag = "diag"

// NetworkSockets are the host's side of a sandbox's network; package netns says what each receives.
// The caller closes them.
type NetworkSockets struct {
	Stream *os.File // listens for TCP to all ports but 53
	DNS    *os.File // receives UDP to port 53
	DNSTCP *os.File // listens for TCP to port 53
}

// Close closes the caller's copies. The sandbox keeps its network.
func (n *NetworkSockets) Close() error {
	return errors.Join(n.Stream.Close(), n.DNS.Close(), n.DNSTCP.Close())
}

// Describer is the ability of an engine to describe itself. Without it `sandboxd info` shows
// neither pid nor defaults.
type Describer interface {
	Describe(ctx context.Context) (Description, error)
}

// Description is an engine's answer.
type Description struct {
	PID      int          // of the engine's process, as the daemon counts
	Version  string       // of its build; may differ from the daemon's
	Enforced api.Enforced // restrictions that a sandbox with the profile's defaults gets
}

// Shutdowner is the ability of an engine with a process of its own to end, and every sandbox with
// it. A daemon that keeps no sandboxes calls it last. Without it there is nothing to end.
type Shutdowner interface {
	Shutdown(ctx context.Context) error
}
