package launcher

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
)

// Overlay is one overlay mount of a sandbox. Lower directories are relative to the layers directory
// unless absolute, uppermost first.
type Overlay struct {
	Target string   `json:"target"` // below the rootfs; "" is the rootfs itself
	Lower  []string `json:"lower"`
	Upper  string   `json:"upper"`
	Work   string   `json:"work"`
}

// Overlays returns the overlays that the rootfs of the sandbox with directory dir consists of, the
// rootfs itself first.
func Overlays(dir string, source *rootfs.Source) ([]Overlay, error) {
	if len(source.Layers) == 0 {
		return nil, errors.New("no layers")
	}
	var lower []string
	for _, chain := range slices.Backward(source.Layers) { // overlayfs wants the uppermost first
		name, err := rootfs.LayerName(chain)
		if err != nil {
			return nil, err
		}
		lower = append(lower, name)
	}
	overlays := []Overlay{{Lower: lower, Upper: filepath.Join(dir, "upper"), Work: filepath.Join(dir, "work")}}
	for i, d := range source.HostDirs {
		if !slices.Contains(rootfs.HostDirs, d) {
			return nil, fmt.Errorf("host directory %q is not one that an image may show", d)
		}
		o := Overlay{
			Target: d, Upper: filepath.Join(dir, "upper-host"+strconv.Itoa(i)), Work: filepath.Join(dir, "work-host"+strconv.Itoa(i)),
		}
		for _, l := range lower {
			o.Lower = append(o.Lower, filepath.Join(l, d))
		}
		o.Lower = append(o.Lower, HostDir+d)
		overlays = append(overlays, o)
	}
	return overlays, nil
}

// Present removes the parts of overlays that a layer does not have. A layer with another type of
// file in the place of such a directory is refused: its author would choose the mounts.
func Present(overlays []Overlay) ([]Overlay, error) {
	for i := range overlays {
		o := &overlays[i]
		if o.Target == "" {
			continue
		}
		var lower []string
		for _, l := range o.Lower {
			if !filepath.IsAbs(l) {
				there, err := isDirectory(filepath.Join(LayersDir, l))
				if err != nil {
					return nil, err
				}
				if !there {
					continue
				}
			}
			lower = append(lower, l)
		}
		o.Lower = lower
	}
	return overlays, nil
}

func isDirectory(dir string) (bool, error) {
	fi, err := os.Lstat(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("look at a layer: %w", err)
	case !fi.IsDir():
		return false, fmt.Errorf("/%s of a layer is not a directory: %w", filepath.Base(dir), runtime.ErrRootfs)
	}
	return true, nil
}

// diffJob is the job of a reading child.
type diffJob struct {
	Overlays []diffOverlay     `json:"overlays"`
	List     bool              `json:"list,omitempty"`
	Options  layer.DiffOptions `json:"options"`
	// Owner has the child's map hold the id of the daemon's user, whose files the directory may have.
	Owner bool `json:"owner,omitempty"`
}

type diffOverlay struct {
	At    string   `json:"at"`
	Upper string   `json:"upper"`
	Lower []string `json:"lower"`
	// Mounted is layer.Overlay.Mounted.
	Mounted []string `json:"mounted,omitempty"`
	// Second stage: descriptors of the same.
	UpperFD int   `json:"upper_fd,omitempty"`
	LowerFD []int `json:"lower_fd,omitempty"`
}

// fdOut is where the child writes.
const fdOut = 3

// maxFrozen bounds the time for which a sandbox is frozen to be read, however slow the reader is.
// The largest possible layer, 64 GiB, takes as long at 75 MB/s.
const maxFrozen = 15 * time.Minute

// Diff writes a sandbox's changes to out, as a layer or as a list of [api.Change], a line of JSON
// each. A confined child reads the sandbox's directories, which its programs may change meanwhile.
func (l *Layers) Diff(ctx context.Context, req *diffRequest, out *os.File) (_ layer.Result, err error) {
	job, err := req.job()
	if err != nil {
		return layer.Result{}, err
	}
	release, err := l.begin(ctx)
	if err != nil {
		return layer.Result{}, err
	}
	defer release()
	ctx, thaw, _, err := l.still(ctx, req)
	if err != nil {
		return layer.Result{}, err
	}
	defer func() { err = errors.Join(err, thaw()) }()
	return l.child(ctx, "read what the sandbox has changed", "diff", job, nil, out)
}

// job returns the job of the reading child.
func (req *diffRequest) job() (*diffJob, error) {
	source := req.Rootfs
	var dir, upper string // of a sandbox; of a layer
	if req.Layer {
		if req.ID != "" || req.Freeze || len(source.Layers) < 2 {
			return nil, errors.New("launcher diff: a layer has one below it, and is of no sandbox")
		}
		last := len(source.Layers) - 1
		name, err := layerDir(source.Layers[last])
		if err != nil {
			return nil, err
		}
		upper, source.Layers = name, source.Layers[:last]
	} else {
		if req.ID == "" || strings.Trim(req.ID, "abcdefghijklmnopqrstuvwxyz0123456789") != "" {
			return nil, fmt.Errorf("sandbox id %q is not one", req.ID)
		}
		dir = filepath.Join(SandboxesDir, req.ID)
		if _, err := os.Lstat(dir); errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("sandbox %s: %w", req.ID, runtime.ErrNotFound)
		}
	}
	if req.Workspace {
		return workspaceJob(req, dir)
	}
	overlays, err := Overlays(dir, &source)
	if err == nil {
		overlays, err = Present(overlays)
	}
	if err != nil {
		return nil, err
	}
	job := &diffJob{List: req.List, Options: layer.DiffOptions{Latest: req.Latest, Limits: req.Limits, Stored: req.Layer, Holes: req.Holes}}
	for _, o := range overlays {
		d := diffOverlay{At: strings.TrimPrefix(o.Target, "/"), Upper: o.Upper}
		if d.At == "" {
			d.At = "."
			for _, dir := range source.HostDirs {
				d.Mounted = append(d.Mounted, strings.TrimPrefix(dir, "/"))
			}
		}
		if req.Layer {
			d.Upper = filepath.Join(upper, o.Target)
			if there, err := isDirectory(d.Upper); err != nil {
				return nil, err
			} else if !there {
				continue
			}
		}
		for _, lower := range o.Lower {
			if !filepath.IsAbs(lower) {
				lower = filepath.Join(LayersDir, lower)
			}
			d.Lower = append(d.Lower, lower)
		}
		job.Overlays = append(job.Overlays, d)
	}
	return job, nil
}

// begin waits for a turn to read.
func (l *Layers) begin(ctx context.Context) (release func(), err error) {
	select {
	case l.diffs <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if ctx.Err() != nil { // the slot and the end came together: freeze nothing for a client that is gone
		<-l.diffs
		return nil, context.Cause(ctx)
	}
	return func() { <-l.diffs }, nil
}

// still freezes a sandbox before it is read, if that is requested and it is in a cgroup. Thaw must
// be called.
func (l *Layers) still(ctx context.Context, req *diffRequest) (_ context.Context, thaw func() error, frozen bool, err error) {
	if !req.Freeze {
		return ctx, func() error { return nil }, false, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, maxFrozen, fmt.Errorf("it took longer than the %s that a sandbox is frozen for at most", maxFrozen))
	goOn, frozen, err := l.freezer.Freeze(ctx, filepath.Join(CgroupDir, req.ID))
	if err != nil {
		cancel()
		return nil, nil, false, fmt.Errorf("sandbox %s: %w", req.ID, err)
	}
	return ctx, func() error { cancel(); return goOn() }, frozen, nil
}

// DiffConfine is the first stage of the child that reads a sandbox's changes: it makes the upper
// directory its root. It returns only on error, after reporting it.
func DiffConfine(arg string) error { return report(layer.Result{}, confineDiff(arg)) }

// DiffMain is the second stage: it writes to descriptor 3.
func DiffMain(arg string, loadFilter func(*specs.LinuxSeccomp) error) error {
	return report(diff(arg, loadFilter))
}

// diffCapabilities are the capabilities for reading the files of every user of the sandbox, without
// changing any.
var diffCapabilities = []uintptr{unix.CAP_DAC_READ_SEARCH}

func confineDiff(arg string) error {
	goruntime.LockOSThread() // as in confineAndExec
	var job diffJob
	if err := json.Unmarshal([]byte(arg), &job); err != nil {
		return fmt.Errorf("decode job: %w", err)
	}
	exe, err := begin(fdOut + 1)
	if err != nil {
		return err
	}
	var uppers, lowers []int
	// Each a mount of its own that is attached nowhere, to be looked at only. The host's directories
	// may have others mounted in them, and the kernel gives them all or nothing.
	const looked = unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC
	for i := range job.Overlays {
		o := &job.Overlays[i]
		if o.UpperFD, err = detached(o.Upper, looked, 0); err != nil {
			return err
		}
		for _, lower := range o.Lower {
			fd, err := detached(lower, looked, unix.AT_RECURSIVE)
			if err != nil {
				return err
			}
			o.LowerFD = append(o.LowerFD, fd)
		}
		o.Lower = nil
		uppers, lowers = append(uppers, o.UpperFD), append(lowers, o.LowerFD...)
	}
	if err := confine(job.Overlays[0].Upper, looked); err != nil {
		return fmt.Errorf("confine layer child: %w", err)
	}
	if _, err := restrict(diffCapabilities, landlockUpper, exe, uppers, lowers); err != nil {
		return fmt.Errorf("confine layer child: %w", err)
	}
	return execute(exe, "diff-confined", &job)
}

func diff(arg string, loadFilter func(*specs.LinuxSeccomp) error) (layer.Result, error) {
	var job diffJob
	if err := json.Unmarshal([]byte(arg), &job); err != nil {
		return layer.Result{}, fmt.Errorf("decode job: %w", err)
	}
	if err := checkCapabilities(diffCapabilities); err != nil {
		return layer.Result{}, fmt.Errorf("confine layer child: %w", err)
	}
	var overlays []layer.Overlay
	for _, o := range job.Overlays {
		upper, err := rootOf(o.UpperFD)
		if err != nil {
			return layer.Result{}, fmt.Errorf("open upper directory: %w", err)
		}
		overlay := layer.Overlay{At: o.At, Upper: upper, Mounted: o.Mounted}
		for _, fd := range o.LowerFD {
			lower, err := rootOf(fd)
			if err != nil {
				return layer.Result{}, fmt.Errorf("open layer below: %w", err)
			}
			overlay.Lower = append(overlay.Lower, lower)
		}
		overlays = append(overlays, overlay)
	}
	if err := unix.Chdir("/"); err != nil {
		return layer.Result{}, fmt.Errorf("enter upper directory: %w", err)
	}
	if err := lock(loadFilter, filter(reading)); err != nil {
		return layer.Result{}, fmt.Errorf("confine layer child: %w", err)
	}
	out := bufio.NewWriterSize(os.NewFile(fdOut, "out"), 128<<10)
	var result layer.Result
	var err error
	if job.List {
		lines := json.NewEncoder(out)
		result, err = layer.Changes(overlays, job.Options.Limits, func(c api.Change) error { return lines.Encode(c) })
	} else {
		result, err = layer.Diff(out, overlays, job.Options)
	}
	if err != nil {
		return layer.Result{}, err
	}
	return result, out.Flush()
}

// freezeTimeout bounds the wait for a sandbox to stand still. A process in an uninterruptible sleep
// can exceed it.
const freezeTimeout = 10 * time.Second

// Freezer counts the reasons for which a sandbox is frozen: the end of the last one thaws it.
type Freezer struct {
	mu     sync.Mutex
	frozen map[string]int
}

// NewFreezer returns a Freezer. All freezes of one cgroup must use the same one.
func NewFreezer() *Freezer { return &Freezer{frozen: make(map[string]int)} }

// Freeze stops the processes of the cgroup dir until thaw is called. Without a cgroup it does
// nothing and reports that.
func (f *Freezer) Freeze(ctx context.Context, dir string) (thaw func() error, frozen bool, err error) {
	f.mu.Lock()
	f.frozen[dir]++
	f.mu.Unlock()
	thaw = func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.frozen[dir]--; f.frozen[dir] > 0 {
			return nil
		}
		delete(f.frozen, dir)
		return cgroup.Thaw(dir)
	}
	ctx, cancel := context.WithTimeout(ctx, freezeTimeout)
	defer cancel()
	err = cgroup.Freeze(ctx, dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, false, errors.Join(err, thaw())
	}
	return thaw, err == nil, nil
}
