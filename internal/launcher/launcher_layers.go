package launcher

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// partial is the prefix of a layer directory that is not complete; what an earlier launcher left is removed.
const partial = ".partial-"

// Layers keeps the extracted layers, in the launcher.
type Layers struct {
	ids    []idmap.Range
	single bool
	slots  chan struct{} // for extracting
	diffs  chan struct{} // for reading what sandboxes have changed

	freezer *Freezer

	mu      sync.Mutex
	serial  int
	working map[string]chan struct{} // chain ids being extracted; closed when done
}

// OpenLayers removes what an interrupted extraction left. The freezer is that of the sandboxes that are read.
func OpenLayers(ids []idmap.Range, single bool, freezer *Freezer) (*Layers, error) {
	entries, err := os.ReadDir(LayersDir)
	if err != nil {
		return nil, fmt.Errorf("read layers: %w", err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), partial) {
			if err := os.RemoveAll(filepath.Join(LayersDir, e.Name())); err != nil {
				return nil, fmt.Errorf("remove interrupted layer: %w", err)
			}
		}
	}
	return &Layers{
		ids: ids, single: single, slots: make(chan struct{}, 2), diffs: make(chan struct{}, 4), working: make(map[string]chan struct{}),
		freezer: freezer,
	}, nil
}

func layerDir(chainID string) (string, error) {
	name, err := rootfs.LayerName(chainID)
	if err != nil {
		return "", err
	}
	return filepath.Join(LayersDir, name), nil
}

// Apply extracts req.Blob into the directory of its chain id, in a confined child. A directory that exists is complete
// and left alone.
func (l *Layers) Apply(ctx context.Context, req *layer.ApplyRequest) (_ layer.Result, err error) {
	final, err := layerDir(req.ChainID)
	if err != nil {
		return layer.Result{}, err
	}
	// One at a time for each chain id; the second finds the first one's directory.
	for {
		l.mu.Lock()
		other := l.working[req.ChainID]
		if other == nil {
			break
		}
		l.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return layer.Result{}, context.Cause(ctx)
		}
	}
	done := make(chan struct{})
	l.working[req.ChainID] = done
	l.serial++
	tmp := filepath.Join(LayersDir, partial+strconv.Itoa(l.serial))
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		delete(l.working, req.ChainID)
		l.mu.Unlock()
		close(done)
	}()
	if _, err := os.Lstat(final); err == nil {
		return layer.Result{}, nil
	}

	select {
	case l.slots <- struct{}{}:
		defer func() { <-l.slots }()
	case <-ctx.Done():
		return layer.Result{}, context.Cause(ctx)
	}
	if ctx.Err() != nil { // the slot and the end came together
		return layer.Result{}, context.Cause(ctx)
	}
	root := l.ids[0].Outside
	if err := os.Mkdir(tmp, 0o755); err != nil { //nolint:gosec // G301: it becomes the "/" of sandboxes
		return layer.Result{}, fmt.Errorf("make layer directory: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(tmp))
		}
	}()
	if err := os.Lchown(tmp, root, root); err != nil {
		return layer.Result{}, fmt.Errorf("make layer directory: %w", err)
	}
	result, err := l.applyIn(ctx, tmp, req)
	if err != nil {
		return layer.Result{}, err
	}
	// The child has synced the file system. The rename makes the layer visible, the sync of the directory makes that last.
	if err := os.Rename(tmp, final); err != nil {
		return layer.Result{}, fmt.Errorf("complete layer: %w", err)
	}
	dir, err := os.Open(LayersDir)
	if err != nil {
		return layer.Result{}, fmt.Errorf("sync layers: %w", err)
	}
	if err := errors.Join(dir.Sync(), dir.Close()); err != nil {
		return layer.Result{}, fmt.Errorf("sync layers: %w", err)
	}
	return result, nil
}

// Remove deletes an extracted layer; one that is not there is no error.
func (l *Layers) Remove(chainID string) error {
	dir, err := layerDir(chainID)
	if err != nil {
		return err
	}
	l.mu.Lock()
	l.serial++
	tmp := filepath.Join(LayersDir, partial+strconv.Itoa(l.serial))
	l.mu.Unlock()
	// Renamed first, so that a half-removed layer is never taken for a whole one.
	if err := os.Rename(dir, tmp); errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("remove layer %s: %w", chainID, err)
	}
	if err := os.RemoveAll(tmp); err != nil {
		return fmt.Errorf("remove layer %s: %w", chainID, err)
	}
	return nil
}

// applyJob is what the child needs to know; childReport is what it answers on its standard output.
type applyJob struct {
	Dir       string       `json:"dir"`
	Parents   []string     `json:"parents"`
	MediaType string       `json:"media_type"`
	DiffID    string       `json:"diff_id"`
	Limits    layer.Limits `json:"limits"`
	Single    bool         `json:"single"`
	FromDiff  bool         `json:"from_diff,omitempty"`
	// Of the second stage:
	Lower    []int `json:"lower,omitempty"`    // descriptors of the layers below, highest first
	Landlock bool  `json:"landlock,omitempty"` // holds it
}

type childReport struct {
	Error  *wireError   `json:"error,omitempty"`
	Result layer.Result `json:"result"`
}

func (l *Layers) applyIn(ctx context.Context, dir string, req *layer.ApplyRequest) (layer.Result, error) {
	job := applyJob{Dir: dir, MediaType: req.MediaType, DiffID: req.DiffID, Limits: req.Limits, Single: l.single, FromDiff: req.FromDiff}
	for _, p := range req.Parents {
		d, err := layerDir(p)
		if err != nil {
			return layer.Result{}, err
		}
		job.Parents = append(job.Parents, d)
	}
	return l.child(ctx, "unpack layer", "apply", &job, req.Blob)
}

// child runs the two stages of a confined child. Its standard input is in; what it has to say comes on its standard output.
func (l *Layers) child(ctx context.Context, doing, stage string, job any, in *os.File, extra ...*os.File) (layer.Result, error) {
	arg, err := json.Marshal(job)
	if err != nil {
		return layer.Result{}, fmt.Errorf("encode job: %w", err)
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", stage, string(arg)) //nolint:gosec // G204: our own sealed binary
	cmd.Env = childEnv
	cmd.Dir = "/"
	if in != nil {
		cmd.Stdin = in // a nil of a type would not be none
	}
	cmd.ExtraFiles = extra // from descriptor 3 on
	var out, complaints limited
	cmd.Stdout, cmd.Stderr = &out, &complaints
	// The sandbox's own map: "chown 0" in the child is the sandbox's root on the host, and nothing above can be named.
	var maps []syscall.SysProcIDMap
	for _, r := range l.ids {
		maps = append(maps, syscall.SysProcIDMap{ContainerID: r.Inside, HostID: r.Outside, Size: r.Size})
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC |
			unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP,
		UidMappings: maps, GidMappings: maps, GidMappingsEnableSetgroups: !l.single,
		Credential: &syscall.Credential{Uid: 0, Gid: 0, NoSetGroups: l.single},
		Pdeathsig:  unix.SIGKILL,
	}
	// The signal comes when the thread ends that has started the child, be the launcher alive or not: libcontainer has threads
	// ended, and the one that we are on may be the next.
	goruntime.LockOSThread()
	runErr := cmd.Run()
	goruntime.UnlockOSThread()
	var report childReport
	if err := json.Unmarshal(out.Bytes(), &report); err != nil {
		// It was killed or has panicked before it could report. What it said is the best there is.
		if ctx.Err() != nil {
			return layer.Result{}, fmt.Errorf("%s: %w", doing, context.Cause(ctx))
		}
		return layer.Result{}, fmt.Errorf("%s: %w: %s", doing, errors.Join(runErr, err), bytes.TrimSpace(complaints.Bytes()))
	}
	if err := report.Error.toError(); err != nil {
		return layer.Result{}, err
	}
	if runErr != nil {
		return layer.Result{}, fmt.Errorf("%s: %w", doing, runErr)
	}
	return report.Result, nil
}

// limited is a buffer that takes what one message of the protocol does and drops the rest: the child reads hostile input, so its
// words are bounded.
type limited struct{ bytes.Buffer }

func (b *limited) Write(p []byte) (int, error) {
	if room := maxPacket - b.Len(); room > 0 {
		b.Buffer.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}
