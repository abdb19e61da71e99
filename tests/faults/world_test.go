package faults

import (
	"context"
	"crypto/md5" // what busybox can compute, too; it only compares
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

const (
	// residents stay from round to round, for as long as they live; the others are made and deleted
	// by the load.
	residents = 3
	// users is how many clients use a daemon at once.
	users = 3
	// most is how many sandboxes the load has at a time, residents apart.
	most = 6
)

// A fault is the process that is killed.
type fault int

const (
	nothing fault = iota
	theDaemon
	theLauncher
	anInit
	daemonAndLauncher
	daemonAndInit
	faults
)

func (f fault) String() string {
	return [...]string{"nothing", "the daemon", "the launcher", "an init", "the daemon and the launcher", "the daemon and an init"}[f]
}

func (f fault) hitsDaemon() bool {
	return f == theDaemon || f == daemonAndLauncher || f == daemonAndInit
}
func (f fault) hitsLauncher() bool { return f == theLauncher || f == daemonAndLauncher }
func (f fault) hitsInit() bool     { return f == anInit || f == daemonAndInit }

// A world is one daemon, and the answers that its users got.
type world struct {
	t      *testing.T
	d      *harness.Daemon
	c      *client.Client
	image  string
	tmp    string // the daemon's own, for temporary files
	base   harness.Snapshot
	blobs  []string
	struck atomic.Int64   // a fault, from just before it
	done   []atomic.Int64 // how often each operation was answered

	mu     sync.Mutex
	count  int             // of names given
	boxes  map[string]*box // by name
	images map[string]*made
	// snapshots are those that were asked for, by name.
	snapshots map[string]*made
}

// A box is a sandbox as its users know it.
type box struct {
	name     string
	resident bool

	mu      sync.Mutex
	id      string // empty until its creation was answered, or a round has found it
	made    bool   // its creation was answered
	doomed  bool   // its deletion was asked for
	deleted bool   // and answered
	victim  bool   // its init was killed
	held    bool   // it was there when the launcher was killed
	loose   bool   // it may have files that no user has written in it
	late    bool   // a user has left before the answer: the abandoned request may still take effect, after later ones
	// detached are the execs that were answered and not yet forgotten.
	detached []detached
	// may holds the possible contents of a file, by its path, or of a label by its key. It is one
	// hash or value if the last change was acknowledged, else those before and after it. Paths begin
	// with a slash.
	may map[string][]string
}

// Contents of a file other than a hash.
const (
	absent   = ""
	anything = "?" // a change that need not be whole was cut off
)

// made is an image that was asked for.
type made struct {
	answered bool
	files    map[string]string // that were there, with no write under way
}

func sum(data []byte) string {
	s := md5.Sum(data)
	return hex.EncodeToString(s[:])
}

// intend notes a change before it is asked for.
func (b *box) intend(key, value string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.may[key] == nil {
		b.may[key] = []string{absent}
	}
	b.may[key] = append(b.may[key], value)
}

// settle notes that a change was answered.
func (b *box) settle(key, value string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.late {
		b.may[key] = append(b.may[key], value)
		return
	}
	b.may[key] = []string{value}
}

// certain returns the files of a user that are known to be in the sandbox, with their contents.
func (b *box) certain(mine string) map[string]string {
	b.mu.Lock()
	defer b.mu.Unlock()
	files := map[string]string{}
	for key, may := range b.may {
		if strings.HasPrefix(key, mine) && len(may) == 1 && may[0] != absent && may[0] != anything {
			files[key] = may[0]
		}
	}
	return files
}

func (b *box) isDoomed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.doomed
}

// begin starts a daemon with its residents and takes the first snapshot.
func begin(t *testing.T, image string) *world {
	t.Helper()
	tmp := t.TempDir()
	w := &world{t: t, tmp: tmp, done: make([]atomic.Int64, len(operations)), boxes: map[string]*box{}, images: map[string]*made{}, snapshots: map[string]*made{}}
	w.d = harness.Start(t, harness.Options{Env: []string{"TMPDIR=" + tmp}, Args: []string{"--pool", fmt.Sprintf("%s=%d", image, parked)}})
	w.c = client.New(w.d.Socket)
	t.Cleanup(w.c.Close)
	w.image = image
	w.d.MustPull(t, image)
	// Things made only once, for the first sandbox of a kind, are there before the first look.
	b := w.newBox(false)
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	defer cancel()
	if err := w.create(ctx, b); err != nil {
		t.Fatal(err)
	}
	u := &user{w: w, r: rand.New(rand.NewPCG(0, 0)), c: w.c}
	if err := errors.Join(commit(ctx, u, b), w.c.DeleteSandbox(ctx, b.id)); err != nil {
		t.Fatal(err)
	}
	delete(w.boxes, b.name)
	w.replenish(ctx)
	w.dropImages(ctx)
	harness.Eventually(t, func() error {
		if p := w.d.System(t).Pools; len(p) != 1 || p[0].Ready != parked {
			return fmt.Errorf("the pools are %+v", p)
		}
		return nil
	})
	w.base, w.blobs = w.look(), w.blobsNow()
	return w
}

// parked is how many sandboxes the daemon keeps ready.
const parked = 2

func (w *world) newBox(resident bool) *box {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.count++
	b := &box{name: fmt.Sprintf("s%d", w.count), resident: resident, may: map[string][]string{}}
	w.boxes[b.name] = b
	return b
}

// create asks for a sandbox and notes that it is there.
func (w *world) create(ctx context.Context, b *box, command ...string) error {
	s, err := w.c.CreateSandbox(ctx, api.CreateSandbox{Image: w.image, Name: b.name, Limits: api.Limits{Pids: 64}, Command: command})
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.id, b.made = s.ID, true
	if s.State != api.StateRunning || s.Name != b.name {
		return wrongf("created sandbox %s is %s (%s) and called %s", b.name, s.State, s.Reason, s.Name)
	}
	return nil
}

// some picks a sandbox that is there to be used; any kind, or one that is no resident.
func (w *world) some(r *rand.Rand, evenResident bool) *box {
	w.mu.Lock()
	defer w.mu.Unlock()
	var names []string
	for name, b := range w.boxes {
		b.mu.Lock()
		if b.id != "" && !b.doomed && (evenResident || !b.resident) {
			names = append(names, name)
		}
		b.mu.Unlock()
	}
	if len(names) == 0 {
		return nil
	}
	slices.Sort(names)
	return w.boxes[names[r.IntN(len(names))]]
}

func (w *world) all() []*box {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []*box
	for _, b := range w.boxes {
		all = append(all, b)
	}
	slices.SortFunc(all, func(a, b *box) int { return strings.Compare(a.name, b.name) })
	return all
}

// replenish puts new residents in the place of those that are gone.
func (w *world) replenish(ctx context.Context) {
	w.t.Helper()
	n := 0
	for _, b := range w.all() {
		if b.resident {
			n++
		}
	}
	for ; n < residents; n++ {
		b := w.newBox(true)
		if err := w.create(ctx, b); err != nil {
			w.t.Fatalf("create a resident: %v", err)
		}
	}
}

// look is a snapshot in which all residents have one name, and so have all unlisted sandboxes, up
// to the size of the warm pool.
func (w *world) look() harness.Snapshot {
	w.c.Close() // the idle connections
	s := w.d.Snapshot(w.t)
	ids := map[string]string{}
	for _, b := range w.all() {
		if b.id != "" {
			ids[b.id] = "resident"
		}
	}
	ready := 0
	for _, dir := range s.Dirs {
		if id, ok := strings.CutPrefix(dir, "data/sandboxes/"); ok && ids[id] == "" && ready < parked {
			ready++
			ids[id] = "parked"
		}
	}
	for i, dir := range s.Dirs {
		for id, name := range ids {
			dir = strings.ReplaceAll(dir, id, name)
		}
		s.Dirs[i] = dir
	}
	return s
}

// blobsNow are the files of images: those of a snapshot are directories.
func (w *world) blobsNow() []string {
	var files []string
	err := filepath.WalkDir(filepath.Join(w.d.DataDir, "blobs"), func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			files = append(files, path)
		}
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return files
}

// nothingLeft waits until the daemon holds no more than at the beginning.
func (w *world) nothingLeft() {
	w.t.Helper()
	harness.Eventually(w.t, func() error {
		diff := w.base.Diff(w.look())
		for _, file := range w.blobsNow() {
			if !slices.Contains(w.blobs, file) {
				diff = append(diff, "new: "+file)
			}
		}
		entries, err := os.ReadDir(w.tmp)
		if err != nil {
			return err
		}
		for _, e := range entries {
			diff = append(diff, "temporary file "+e.Name())
		}
		if len(diff) > 0 {
			return fmt.Errorf("left:\n  %s\nthe daemon has open:\n  %s", strings.Join(diff, "\n  "), strings.Join(open(w.d.PID()), "\n  "))
		}
		return nil
	})
}

// settle waits until the daemon has finished all requests. A client that went away has not waited
// for its last one, which may come as late as the disk is slow: a snapshot after the round's were
// looked at, a label after its value was checked. At the daemon's end the connection lasts as
// long.
func (w *world) settle() {
	w.t.Helper()
	harness.Eventually(w.t, func() error {
		w.c.Close() // the idle connections
		w.d.HTTP.CloseIdleConnections()
		w.d.System(w.t) // by a new one, so that all that came before it have been accepted
		n, err := connections(w.d)
		if err == nil && n > 1 {
			err = fmt.Errorf("%d connections to the daemon are left after everybody has gone", n-1)
		}
		return err
	})
}

// connections counts those that a daemon has accepted and not yet closed: at least one, that of
// the last request.
func connections(d *harness.Daemon) (n int, err error) {
	data, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		return 0, err
	}
	its := map[string]bool{}
	for _, link := range open(d.PID()) {
		if _, inode, socket := strings.Cut(link, " socket:["); socket {
			its[strings.TrimSuffix(inode, "]")] = true
		}
	}
	const flags, listens, inode, path = 3, "00010000", 6, 7 // columns, and the socket's own names in the first
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		if len(f) > path && filepath.Base(f[path]) == filepath.Base(d.Socket) && f[flags] != listens && its[f[inode]] {
			n++
		}
	}
	if n == 0 {
		return 0, errors.New("a daemon's own connections are not found")
	}
	return n, nil
}

// dropImages removes all that were made.
func (w *world) dropImages(ctx context.Context) {
	w.t.Helper()
	list, err := w.c.Images(ctx)
	if err != nil {
		w.t.Fatal(err)
	}
	listed := map[string]bool{}
	for _, i := range list {
		listed[i.Reference] = true
		if i.Reference == w.image || i.Reference == api.HostImage {
			continue
		}
		if w.images[i.Reference] == nil {
			w.t.Errorf("image %s is listed, and nobody has asked for it", i.Reference)
		}
		if _, err := w.c.RemoveImage(ctx, i.Reference, true); err != nil {
			w.t.Errorf("remove image %s: %v", i.Reference, err)
		}
	}
	for reference, m := range w.images {
		if m.answered && !listed[reference] {
			w.t.Errorf("image %s was answered and is lost", reference)
		}
	}
	clear(w.images)
	if _, err := w.c.PruneImages(ctx, api.PruneImages{}); err != nil {
		w.t.Errorf("prune: %v", err)
	}
}

// open returns the open descriptors of a process.
func open(pid int) []string {
	var links []string
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return []string{err.Error()}
	}
	for _, e := range entries {
		if link, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil {
			links = append(links, e.Name()+" "+link)
		}
	}
	return links
}
