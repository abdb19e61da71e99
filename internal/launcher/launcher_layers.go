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
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/rootfs"
)

// partial is the prefix of an incomplete layer's directory; those of an earlier launcher are
// removed.
const partial = ".partial-"

// Layers keeps the extracted layers, in the launcher.
type Layers struct {
	ids    []idmap.Range
	single bool
	slots  chan struct{} // for extracting
	diffs  chan struct{} // semaphore of readers of sandboxes

	freezer *Freezer

	mu      sync.Mutex
	serial  int
	working map[string]chan struct{} // chain ids being extracted; closed when done
	made    map[string]layer.Usage   // by chain id: a client may ask for a layer that another has just made
}

// OpenLayers removes the remains of interrupted extractions. The freezer is for the sandboxes that
// are read.
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
		made: make(map[string]layer.Usage), freezer: freezer,
	}, nil
}

func layerDir(chainID string) (string, error) {
	name, err := rootfs.LayerName(chainID)
	if err != nil {
		return "", err
	}
	return filepath.Join(LayersDir, name), nil
}

// Apply extracts the blobs of req, each in a confined child of its own, and gives the directories
// their names when all of them are complete and on disk. A directory that exists is complete and
// left alone. On error none has been kept, and there is a result for each layer below the one that
// is to blame; for all of them where none is.
func (l *Layers) Apply(ctx context.Context, req *layer.ApplyRequest) (_ []layer.Result, err error) {
	if len(req.Layers) < 1 || len(req.Layers) > layer.MaxApply {
		return nil, fmt.Errorf("%d layers, 1 to %d are allowed", len(req.Layers), layer.MaxApply)
	}
	jobs := make([]applyJob, len(req.Layers))
	final := make([]string, len(req.Layers))
	var below []string // directories
	for _, p := range req.Parents {
		dir, err := layerDir(p)
		if err != nil {
			return nil, err
		}
		below = append(below, dir)
	}
	for i, r := range req.Layers {
		jobs[i] = applyJob{MediaType: r.MediaType, DiffID: r.DiffID, Limits: r.Limits, Single: l.single, FromDiff: r.FromDiff}
		if final[i], err = layerDir(r.ChainID); err != nil {
			return nil, err
		}
	}
	leave, err := l.claim(ctx, req.Layers)
	if err != nil {
		return nil, err
	}
	defer leave()

	results := make([]layer.Result, len(jobs))
	var begun []int
	defer func() {
		if err != nil {
			for _, i := range begun {
				err = errors.Join(err, os.RemoveAll(jobs[i].Dir)) // nothing where it has its name
			}
		}
	}()
	var there layer.Usage // by layers that exist
	for i := range jobs {
		dir := final[i]
		jobs[i].Limits.Below = jobs[i].Limits.Below.Add(there)
		if _, err := os.Lstat(dir); err != nil {
			if dir, err = l.makePartial(); err != nil {
				return nil, err
			}
			jobs[i].Dir, jobs[i].Parents = dir, slices.Clone(below)
			begun = append(begun, i)
		} else {
			l.mu.Lock()
			known, ok := l.made[req.Layers[i].ChainID]
			l.mu.Unlock()
			if !ok {
				known = req.Layers[i].Known
			}
			results[i] = layer.Result{Size: known.Bytes, Entries: known.Entries}
			there = there.Add(known)
		}
		below = append(below, dir)
	}
	if len(begun) == 0 {
		return results, nil
	}
	dir, err := os.Open(LayersDir)
	if err != nil {
		return nil, fmt.Errorf("open layers: %w", err)
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	disk := startWriting(dir)
	failed, err := l.unpack(ctx, jobs, begun, results, req)
	// Waited for in any case: it holds the directory.
	derr := disk.finish(err == nil)
	share(results)
	if err != nil {
		return results[:failed], err
	}
	if derr != nil {
		return results, fmt.Errorf("sync layers: %w", derr)
	}
	// All is on disk. The renames make the layers visible, lowest first, the sync of the directory
	// makes that last.
	for _, i := range begun {
		if err := os.Rename(jobs[i].Dir, final[i]); err != nil {
			return results, fmt.Errorf("complete layer: %w", err)
		}
		l.mu.Lock()
		l.made[req.Layers[i].ChainID] = results[i].Usage()
		l.mu.Unlock()
	}
	if err := dir.Sync(); err != nil {
		return results, fmt.Errorf("sync layers: %w", err)
	}
	return results, nil
}

// claim waits until no other request extracts any of the layers, and claims all at once, so that no
// two requests wait for each other. The later one finds the first one's directories.
func (l *Layers) claim(ctx context.Context, layers []layer.Request) (leave func(), err error) {
	for {
		l.mu.Lock()
		var other chan struct{}
		for _, r := range layers {
			if other == nil {
				other = l.working[r.ChainID]
			}
		}
		if other == nil {
			break
		}
		l.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
		}
		if ctx.Err() != nil { // or both came together
			return nil, context.Cause(ctx)
		}
	}
	defer l.mu.Unlock()
	done := make(chan struct{})
	for _, r := range layers {
		l.working[r.ChainID] = done
	}
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, r := range layers {
			delete(l.working, r.ChainID)
		}
		close(done)
	}, nil
}

// makePartial makes a directory for a layer.
func (l *Layers) makePartial() (dir string, err error) {
	l.mu.Lock()
	l.serial++
	dir = filepath.Join(LayersDir, partial+strconv.Itoa(l.serial))
	l.mu.Unlock()
	if err := os.Mkdir(dir, 0o755); err != nil { //nolint:gosec // G301: it becomes the "/" of sandboxes
		return "", fmt.Errorf("make layer directory: %w", err)
	}
	root := l.ids[0].Outside
	if err := os.Lchown(dir, root, root); err != nil {
		return "", errors.Join(fmt.Errorf("make layer directory: %w", err), os.Remove(dir))
	}
	return dir, nil
}

// unpack runs the children, some at a time and in order: each ends after the layers below it are
// complete. On error it names the failed layer, and all children have ended.
func (l *Layers) unpack(ctx context.Context, jobs []applyJob, begun []int, results []layer.Result, req *layer.ApplyRequest) (failed int, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var children sync.WaitGroup
	var mu sync.Mutex    // of failed, err and done
	var done layer.Usage // usage of complete layers, which are below all others
	fail := func(i int, cause error) {
		mu.Lock()
		defer mu.Unlock()
		if err == nil { // the others' are that they were ended
			failed, err = i, cause
		}
		cancel(cause)
	}
	settled := make(chan struct{}) // closed when the layers below the next one are complete
	close(settled)
	for _, i := range begun {
		if err := l.take(ctx); err != nil {
			fail(i, err)
			break
		}
		job := &jobs[i]
		others := job.Limits.Below
		mu.Lock()
		job.Limits.Below = others.Add(done)
		mu.Unlock()
		below, complete := settled, make(chan struct{})
		settled = complete
		children.Go(func() {
			defer func() { <-l.slots }()
			result, err := l.applyOne(ctx, job, req.Layers[i].Blob, below)
			if err == nil {
				mu.Lock()
				done = done.Add(result.Usage())
				err = job.Limits.Check(others.Add(done)) // the one right below was not complete when it began
				mu.Unlock()
			}
			if err != nil {
				fail(i, err)
				return
			}
			results[i] = result
			close(complete)
		})
	}
	children.Wait()
	return failed, err
}

// take waits for a slot.
func (l *Layers) take(ctx context.Context) error {
	select {
	case l.slots <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if ctx.Err() != nil { // both came together
		<-l.slots
		return context.Cause(ctx)
	}
	return nil
}

// share keeps as many of the skipped entries as one answer has room for.
func share(results []layer.Result) {
	left := layer.MaxSkipped
	for i := range results {
		r := &results[i]
		n := min(left, len(r.Skipped))
		r.SkippedMore += int64(len(r.Skipped) - n)
		r.Skipped = r.Skipped[:n]
		left -= n
	}
}

// writing makes a file system write its data down continuously, so that it is not all left to the
// end.
type writing struct {
	dir  *os.File
	stop chan struct{}
	done chan error
}

// writeEvery is the sync interval. A sync waits for the disk, and delays writers now and then.
const writeEvery = 500 * time.Millisecond

// startWriting begins; dir must stay open until finish has returned. Errors of writing that happen
// from now on are found.
func startWriting(dir *os.File) *writing {
	w := &writing{dir: dir, stop: make(chan struct{}), done: make(chan error, 1)}
	go func() {
		tick := time.NewTicker(writeEvery)
		defer tick.Stop()
		var err error
		for {
			select {
			case <-tick.C:
				// The kernel reports an error once.
				err = errors.Join(err, unix.Syncfs(int(dir.Fd())))
			case <-w.stop:
				w.done <- err
				return
			}
		}
	}()
	return w
}

// finish ends it and, if that is wanted, returns when everything is on disk.
func (w *writing) finish(wanted bool) error {
	close(w.stop)
	err := <-w.done
	if wanted && err == nil {
		err = unix.Syncfs(int(w.dir.Fd()))
	}
	return err
}

// Remove deletes an extracted layer; a missing one is no error. It waits for an extraction under
// way, whose client has given up. A removal that has begun is completed even if ctx ends.
func (l *Layers) Remove(ctx context.Context, chainID string) error {
	dir, err := layerDir(chainID)
	if err != nil {
		return err
	}
	leave, err := l.claim(ctx, []layer.Request{{ChainID: chainID}})
	if err != nil {
		return fmt.Errorf("remove layer %s: %w", chainID, err)
	}
	l.mu.Lock()
	delete(l.made, chainID)
	l.serial++
	tmp := filepath.Join(LayersDir, partial+strconv.Itoa(l.serial))
	l.mu.Unlock()
	// Rename it first, so that a half-removed layer is never taken for a complete one.
	err = os.Rename(dir, tmp)
	leave()
	if errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("remove layer %s: %w", chainID, err)
	}
	if err := os.RemoveAll(tmp); err != nil {
		return fmt.Errorf("remove layer %s: %w", chainID, err)
	}
	return nil
}

// applyJob is the job of an unpacking child; childReport is its answer on its standard output.
type applyJob struct {
	Dir       string       `json:"dir"`
	Parents   []string     `json:"parents"`
	MediaType string       `json:"media_type"`
	DiffID    string       `json:"diff_id"`
	Limits    layer.Limits `json:"limits"`
	Single    bool         `json:"single"`
	FromDiff  bool         `json:"from_diff,omitempty"`
	Plain     bool         `json:"plain,omitempty"` // layer.Options.Plain
	// Of the second stage:
	Lower    []int `json:"lower,omitempty"`    // descriptors of the layers below, highest first
	Landlock bool  `json:"landlock,omitempty"` // holds it
}

type childReport struct {
	Error  *wireError   `json:"error,omitempty"`
	Result layer.Result `json:"result"`
}

// applyOne extracts a blob in a child, which ends after below is closed.
func (l *Layers) applyOne(ctx context.Context, job *applyJob, blob *os.File, below <-chan struct{}) (_ layer.Result, err error) {
	gate, open, err := os.Pipe()
	if err != nil {
		return layer.Result{}, fmt.Errorf("unpack layer: %w", err)
	}
	ended := make(chan struct{})
	var opener sync.WaitGroup
	opener.Go(func() {
		select {
		case <-below:
			_, _ = open.Write([]byte{1}) // a child that has ended has reported the reason
		case <-ended:
		}
	})
	result, err := l.child(ctx, "unpack layer", "apply", job, blob, gate)
	close(ended)
	opener.Wait()
	return result, errors.Join(err, gate.Close(), open.Close())
}

// child runs the two stages of a confined child. Its standard input is in; its report comes on its
// standard output.
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
	// The sandbox's own map: "chown 0" in the child is the sandbox's root on the host, and nothing
	// above can be named.
	var maps []syscall.SysProcIDMap
	ids := l.ids
	if diff, ok := job.(*diffJob); ok && diff.Owner {
		ids = WithOwner(ids)
	}
	for _, r := range ids {
		maps = append(maps, syscall.SysProcIDMap{ContainerID: r.Inside, HostID: r.Outside, Size: r.Size})
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC |
			unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP,
		UidMappings: maps, GidMappings: maps, GidMappingsEnableSetgroups: !l.single,
		Credential: &syscall.Credential{Uid: 0, Gid: 0, NoSetGroups: l.single},
		Pdeathsig:  unix.SIGKILL,
	}
	// The signal comes when the thread ends that has started the child, be the launcher alive or not:
	// libcontainer has threads ended, and the one that we are on may be the next.
	goruntime.LockOSThread()
	runErr := cmd.Run()
	goruntime.UnlockOSThread()
	var report childReport
	if err := json.Unmarshal(out.Bytes(), &report); err != nil {
		// It was killed or has panicked before it could report: its standard error has to do.
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

// limited is a buffer that keeps as much as one message of the protocol holds and drops the rest:
// the child reads hostile input, so its output is bounded.
type limited struct{ bytes.Buffer }

func (b *limited) Write(p []byte) (int, error) {
	if room := maxPacket - b.Len(); room > 0 {
		b.Buffer.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}
