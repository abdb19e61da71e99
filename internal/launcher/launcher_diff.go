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

// Overlay is one overlay mount of a sandbox. Lower directories are relative to the layers directory unless absolute,
// uppermost first.
type Overlay struct {
	Target string   `json:"target"` // below the rootfs; "" is the rootfs itself
	Lower  []string `json:"lower"`
	Upper  string   `json:"upper"`
	Work   string   `json:"work"`
}

// Overlays says what the rootfs of the sandbox whose directory is dir is mounted of, the rootfs itself first.
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

// diffJob is what the child needs to know.
type diffJob struct {
	Overlays []diffOverlay     `json:"overlays"`
	List     bool              `json:"list,omitempty"`
	Options  layer.DiffOptions `json:"options"`
}

type diffOverlay struct {
	At    string   `json:"at"`
	Upper string   `json:"upper"`
	Lower []string `json:"lower"`
	// Second stage: descriptors of the same.
	UpperFD int   `json:"upper_fd,omitempty"`
	LowerFD []int `json:"lower_fd,omitempty"`
}

// fdOut is where the child writes.
const fdOut = 3

// maxFrozen bounds how long a sandbox stands still to be read, whatever the one does who takes what is read. The largest layer
// that there may be, 64 GiB, takes as long at 75 MB/s.
const maxFrozen = 15 * time.Minute

// Diff writes what a sandbox has changed to out, as a layer or as a list of [api.Change], a line of JSON each. A confined
// child reads the sandbox's directories, which may be written to meanwhile by whoever is in it.
func (l *Layers) Diff(ctx context.Context, req *DiffRequest, out *os.File) (_ layer.Result, err error) {
	if req.ID == "" || strings.Trim(req.ID, "abcdefghijklmnopqrstuvwxyz0123456789") != "" {
		return layer.Result{}, fmt.Errorf("sandbox id %q is not one", req.ID)
	}
	dir := filepath.Join(SandboxesDir, req.ID)
	if _, err := os.Lstat(dir); errors.Is(err, os.ErrNotExist) {
		return layer.Result{}, fmt.Errorf("sandbox %s: %w", req.ID, runtime.ErrNotFound)
	}
	overlays, err := Overlays(dir, &req.Rootfs)
	if err != nil {
		return layer.Result{}, err
	}
	job := diffJob{List: req.List, Options: layer.DiffOptions{Latest: req.Latest, Limits: req.Limits}}
	for _, o := range overlays {
		d := diffOverlay{At: strings.TrimPrefix(o.Target, "/"), Upper: o.Upper}
		if d.At == "" {
			d.At = "."
		}
		for _, lower := range o.Lower {
			if !filepath.IsAbs(lower) {
				lower = filepath.Join(LayersDir, lower)
			}
			d.Lower = append(d.Lower, lower)
		}
		job.Overlays = append(job.Overlays, d)
	}
	select {
	case l.diffs <- struct{}{}:
		defer func() { <-l.diffs }()
	case <-ctx.Done():
		return layer.Result{}, context.Cause(ctx)
	}
	if ctx.Err() != nil { // the slot and the end came together: nothing is to be frozen for nobody
		return layer.Result{}, context.Cause(ctx)
	}
	if req.Freeze {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, maxFrozen, fmt.Errorf("it took longer than the %s that a sandbox is frozen for at most", maxFrozen))
		defer cancel()
		thaw, err := l.freezer.Freeze(ctx, filepath.Join(CgroupDir, req.ID))
		if err != nil {
			return layer.Result{}, fmt.Errorf("sandbox %s: %w", req.ID, err)
		}
		defer func() { err = errors.Join(err, thaw()) }()
	}
	return l.child(ctx, "read what the sandbox has changed", "diff", &job, nil, out)
}

// DiffConfine is the first stage of the child that reads what a sandbox has changed: it makes the upper directory its whole
// world. It returns only on error, which it has reported.
func DiffConfine(arg string) error { return report(layer.Result{}, confineDiff(arg)) }

// DiffMain is the second stage: it writes to descriptor 3.
func DiffMain(arg string, loadFilter func(*specs.LinuxSeccomp) error) error {
	return report(diff(arg, loadFilter))
}

// diffCapabilities are what reading the files of every user of the sandbox takes, and nothing that changes any.
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
	// Each a mount of its own that is attached nowhere, to be looked at only. The host's directories may have others mounted
	// in them, and the kernel gives them all or nothing.
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
		overlay := layer.Overlay{At: o.At, Upper: upper}
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

// freezeTimeout bounds the wait for a sandbox to stand still. A process in an uninterruptible sleep can exceed it.
const freezeTimeout = 10 * time.Second

// Freezer counts who wants a sandbox frozen: the last one thaws it.
type Freezer struct {
	mu     sync.Mutex
	frozen map[string]int
}

// NewFreezer returns one for all who freeze the same cgroups.
func NewFreezer() *Freezer { return &Freezer{frozen: make(map[string]int)} }

// Freeze stops what runs in the cgroup dir until thaw is called. Without a cgroup it does nothing.
func (f *Freezer) Freeze(ctx context.Context, dir string) (thaw func() error, err error) {
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
	if err := cgroup.Freeze(ctx, dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, errors.Join(err, thaw())
	}
	return thaw, nil
}
