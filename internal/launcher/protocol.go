package launcher

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	goruntime "runtime"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/internal/unixmsg"
	"github.com/sandboxd/sandboxd/runtime"
)

// maxPacket bounds a message; it stays below the kernel's default socket buffer
// (net.core.wmem_default, 208 KiB).
const maxPacket = 160 << 10

// maxFiles bounds the descriptors of one message; SCM_MAX_FD is 253.
const maxFiles = 200

type op string

const (
	opSession     op = "session"
	opInfo        op = "info"
	opCreate      op = "create"
	opStart       op = "start"
	opList        op = "list"
	opLeftovers   op = "leftovers"
	opKill        op = "kill"
	opStop        op = "stop"
	opPause       op = "pause"
	opResume      op = "resume"
	opDelete      op = "delete"
	opUpdate      op = "update"
	opStats       op = "stats"
	opOOMKills    op = "oom-kills"
	opApply       op = "apply"
	opDiff        op = "diff"
	opSnapshot    op = "snapshot"
	opRemoveLayer op = "remove-layer"
	opDeposit     op = "deposit"
	opWithdraw    op = "withdraw"
	opDrop        op = "drop"
	opRange       op = "range"
	opNetwork     op = "network"
	opSocket      op = "network-socket"
	opVolume      op = "volume"
	opShutdown    op = "shutdown"
)

// request is the only message of the daemon on a connection.
type request struct {
	Op     op                  `json:"op"`
	ID     string              `json:"id,omitempty"`     // stop, pause, resume, kill, delete, update, stats, oom-kills, network, network-socket
	After  string              `json:"after,omitempty"`  // list: last id of the answer before
	Spec   *runtime.Spec       `json:"spec,omitempty"`   // create, start; with the control socket, and the mounts that the answer before wanted
	Grace  time.Duration       `json:"grace,omitempty"`  // stop
	Signal int                 `json:"signal,omitempty"` // stop
	Main   int                 `json:"main,omitempty"`   // stop
	Change *runtime.Change     `json:"change,omitempty"` // update
	Apply  *layer.ApplyRequest `json:"apply,omitempty"`  // with the blobs, one for each layer
	Diff   *diffRequest        `json:"diff,omitempty"`   // with the pipe to write to
	Layer  string              `json:"layer,omitempty"`  // remove-layer: a chain id
	Snap   *snapshotRequest    `json:"snap,omitempty"`   // snapshot
	Range  int                 `json:"range,omitempty"`  // range: its number; with its mounts
	Socket string              `json:"socket,omitempty"` // network-socket: "tcp", "udp" or "diag"
	Volume *volumeRequest      `json:"volume,omitempty"` // volume; with the pipe of an archive
	// Set names the set to store, with its descriptors, or to drop; for withdraw the last one of the
	// answer before.
	Set wireSet `json:"deposit,omitzero"`

	// filter is the seccomp filter of Spec, as JSON. It follows the message in its packet: the
	// launcher recognizes the bytes of one that it has ([filters]). Older daemons send it within Spec.
	filter []byte
}

// wireSet names a set of the descriptor store.
type wireSet struct {
	Sandbox string `json:"sandbox,omitempty"`
	Name    string `json:"name,omitempty"`
	Files   int    `json:"files,omitempty"` // withdraw: number of the answer's descriptors that belong to it
}

// response is the only message of the launcher on a connection.
type response struct {
	Error    *wireError    `json:"error,omitempty"`
	Started  []wireStarted `json:"started,omitempty"` // create, list; one pidfd each, in this order
	More     bool          `json:"more,omitempty"`    // list, withdraw: ask again for the rest, after the last one
	IDs      []string      `json:"ids,omitempty"`     // leftovers
	Info     *Info         `json:"info,omitempty"`
	Enforced *api.Enforced `json:"enforced,omitempty"` // update
	Stats    *api.Stats    `json:"stats,omitempty"`
	Count    int           `json:"count,omitempty"`
	Layer    *layer.Result `json:"layer,omitempty"` // diff, snapshot, volume
	// Of apply: one for each layer, with an error for each below the failed one.
	Layers []layer.Result `json:"layers,omitempty"`
	Frozen bool           `json:"frozen,omitempty"`   // snapshot: the sandbox stood still while it was read
	Sets   []wireSet      `json:"deposits,omitempty"` // withdraw; with their descriptors, in this order
	Range  int            `json:"range,omitempty"`    // create, start: number of the range that is wanted first, or for which mounts are wanted
	// Sockets is the number of descriptors of network and network-socket.
	Sockets int `json:"sockets,omitempty"`
	// Usage is the disk usage of a measured volume; nil in other answers.
	Usage *runtime.VolumeUsage `json:"usage,omitempty"`
}

type wireStarted struct {
	ID       string       `json:"id"`
	Enforced api.Enforced `json:"enforced"`
	Limits   api.Limits   `json:"limits"`
	Deadline time.Time    `json:"deadline"`
	Paused   bool         `json:"paused,omitempty"`
}

func (w *wireStarted) started(pidfd *os.File) *runtime.Started {
	return &runtime.Started{ID: w.ID, Enforced: w.Enforced, Limits: w.Limits, Deadline: w.Deadline, Paused: w.Paused, Pidfd: pidfd}
}

// diffRequest asks for the changes of a sandbox's rootfs, whether it runs or not.
type diffRequest struct {
	ID     string        `json:"id"`
	Rootfs rootfs.Source `json:"rootfs"` // rootfs that it was created with
	// Layer asks for the changes of the uppermost layer of Rootfs, a snapshot's, against those below.
	// Then there is no ID.
	Layer bool `json:"layer,omitempty"`
	// Workspace asks for the changes of the sandbox's workspace, and of nothing else.
	Workspace bool `json:"workspace,omitempty"`
	// Freeze stops the sandbox while it is read, if it runs in a cgroup.
	Freeze bool `json:"freeze,omitempty"`
	// List asks for the list of changes rather than the layer.
	List   bool         `json:"list,omitempty"`
	Latest time.Time    `json:"latest,omitzero"` // see layer.DiffOptions
	Limits layer.Limits `json:"limits,omitzero"`
	// Holes is layer.DiffOptions.Holes: the stream is for a snapshot, not for an image.
	Holes bool `json:"holes,omitempty"`
}

// wireDiffRequest returns the request in the form of the protocol.
func wireDiffRequest(req *runtime.DiffRequest) diffRequest {
	l := &req.Limits
	return diffRequest{
		ID: req.ID, Rootfs: req.Rootfs, Workspace: req.Workspace, Layer: req.Layer, Freeze: req.Freeze, Latest: req.Latest, Holes: req.Holes,
		Limits: layer.Limits{
			Entries: l.Entries, Bytes: l.Bytes, Below: layer.Usage{Entries: l.BelowEntries, Bytes: l.BelowBytes},
			Ratio: l.Ratio, RatioFloor: l.RatioFloor, Depth: l.Depth, Name: l.Name,
		},
	}
}

// snapshotRequest asks for a layer with the changes of a sandbox.
type snapshotRequest struct {
	Diff diffRequest `json:"diff"`
	// ChainID is the name of the new layer, "sha256:<hex>". No layer has it yet.
	ChainID string `json:"chain_id"`
}

// Info describes the launcher; its pidfd comes with the answer.
type Info struct {
	Version  string       `json:"version"`  // version of the build; a daemon of another version still speaks to it
	Enforced api.Enforced `json:"enforced"` // restrictions of a sandbox with the profile's defaults
}

// classes are the errors that keep their identity across the socket. A test walks the table both
// ways.
var classes = []struct {
	name string
	err  error
}{
	{"not-found", runtime.ErrNotFound},
	{"exists", runtime.ErrExists},
	{"unenforceable", runtime.ErrUnenforceable},
	{"unavailable", runtime.ErrUnavailable},
	{"rootfs", runtime.ErrRootfs},
	{"in-use", runtime.ErrInUse},
	{"processes", runtime.ErrProcesses},
	{"no-network", runtime.ErrNoNetwork},
	{"no-owner", runtime.ErrNoOwner},
	{"too-many", runtime.ErrTooMany},
	{"volume-in-use", runtime.ErrVolumeInUse},
	{"volume-not-empty", runtime.ErrVolumeNotEmpty},
	{"wants-range", errWantsRange},
	{"wants-mounts", errWantsMounts},
	{"wants-workspace", errWantsWorkspace},
	{"layer-invalid", layer.ErrInvalid},
	// Part of the class before.
	{"layer-entries", layer.ExceededEntries},
	{"layer-bytes", layer.ExceededBytes},
	{"layer-ratio", layer.ExceededRatio},
	{"layer-depth", layer.ExceededDepth},
	{"layer-changed", layer.ErrChanged},
}

// wireError is an error of the launcher on the wire.
type wireError struct {
	Class   string `json:"class,omitempty"`
	Message string `json:"message"`
}

func toWire(err error) *wireError {
	if err == nil {
		return nil
	}
	w := &wireError{Message: err.Error()}
	for _, c := range classes {
		if errors.Is(err, c.err) {
			w.Class = c.name
		}
	}
	return w
}

// remoteError is a wireError in the daemon: it has the launcher's message, and errors.Is finds its
// class.
type remoteError struct {
	message string
	class   error
}

func (e *remoteError) Error() string { return e.message }
func (e *remoteError) Unwrap() error { return e.class }

func (w *wireError) toError() error {
	if w == nil {
		return nil
	}
	e := &remoteError{message: w.Message}
	for _, c := range classes {
		if c.name == w.Class {
			e.class = c.err
		}
	}
	return e
}

// Texts about a message that one side does not understand. Launchers of other versions send them
// too, so they must not change.
const (
	saysUndecoded = "decode message"
	saysUnknown   = "unknown request"
)

// format bounds the messages of both sides.
var format = unixmsg.Format{MaxBytes: maxPacket, MaxFiles: maxFiles}

// send writes one message with its descriptors, which stay the caller's.
func send(c *net.UnixConn, msg any, files ...*os.File) error {
	data, err := json.Marshal(msg)
	if err != nil {
		return fmt.Errorf("encode message: %w", err)
	}
	if req, ok := msg.(*request); ok {
		data = append(data, req.filter...)
	}
	if len(data) > maxPacket {
		return fmt.Errorf("message of %d bytes exceeds the launcher protocol's %d", len(data), maxPacket)
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	conn, err := c.SyscallConn()
	if err == nil {
		err = format.Send(conn, data, fds...)
	}
	goruntime.KeepAlive(files)
	if err != nil {
		return fmt.Errorf("send message: %w", err)
	}
	return nil
}

// receive reads one message strictly. Its descriptors are close-on-exec and become the caller's; on
// error there are none.
func receive(c *net.UnixConn, msg any) ([]*os.File, error) {
	conn, err := c.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("receive message: %w", err)
	}
	var undecoded error
	fds, err := format.Receive(conn, 0, func(p []byte) error {
		undecoded = decode(p, msg)
		return undecoded
	})
	switch {
	case undecoded != nil:
		return nil, undecoded
	case err != nil:
		return nil, fmt.Errorf("receive message: %w", err)
	}
	return unixmsg.Files(fds, "received"), nil
}

// decode is strict: a field that one side does not know may be a restriction that it would fail to
// apply.
func decode(data []byte, msg any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(msg); err != nil {
		return fmt.Errorf(saysUndecoded+": %w", err)
	}
	if !d.More() {
		return nil
	}
	if req, ok := msg.(*request); ok && req.Spec != nil {
		req.filter = bytes.Clone(data[d.InputOffset():])
		return nil
	}
	return errors.New(saysUndecoded + ": data after the message")
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// requestTimeout bounds the wait of either side for a message on a new connection. Creating a
// sandbox takes milliseconds; the bound is for a machine under heavy load.
const requestTimeout = 60 * time.Second
