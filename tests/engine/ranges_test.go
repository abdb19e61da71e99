package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/runtimetest"
)

// run starts a sandbox by Create or Start, and returns its init's pid.
func run(t *testing.T, do func(context.Context, *runtime.Spec, *os.File) (*runtime.Started, error), spec *runtime.Spec) (*runtime.Started, int, error) {
	t.Helper()
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(shortDir(t), "s"), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	control, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer control.Close()
	st, err := do(t.Context(), spec, control)
	if err != nil {
		return nil, 0, err
	}
	t.Cleanup(func() { _ = st.Pidfd.Close() })
	return st, runtime.PIDOf(st.Pidfd), nil
}

// start is run, of a sandbox that must start. It returns the host uid of the sandbox's root.
func start(t *testing.T, f runtimetest.Fixture, id string) int {
	t.Helper()
	_, pid, err := run(t, f.Engine.Create, f.NewSpec(t, id))
	if err != nil {
		t.Fatal(err)
	}
	return rootOf(t, pid)
}

// rootOf returns the host uid of root in a process's user namespace, whose maps must have one range
// of the full size.
func rootOf(t *testing.T, pid int) int {
	t.Helper()
	var first [2]int
	for i, name := range []string{"uid_map", "gid_map"} {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		if err != nil {
			t.Fatal(err)
		}
		var inside, size int
		if n, err := fmt.Sscan(string(data), &inside, &first[i], &size); n != 3 || inside != 0 || size != idmap.SandboxIDs {
			t.Fatalf("%s is %q, %v", name, data, err)
		}
	}
	if first[0] != first[1] {
		t.Errorf("uids begin at %d, gids at %d", first[0], first[1])
	}
	return first[0]
}

// end deletes sandboxes.
func end(t *testing.T, e runtime.Engine, ids ...string) {
	t.Helper()
	for _, id := range ids {
		if err := e.Delete(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
}

// Each sandbox has its own range, none has that of the files, and ranges are used again, however a
// sandbox has ended or failed to start.
func TestRangesAreOwnAndUsedAgain(t *testing.T) {
	testenv.RequireOwnIDs(t)
	o := options(t)
	asked := 0
	o.MountRange = func(ctx context.Context, number int) ([]*os.File, error) {
		asked++
		return launcher.MountRange(ctx, o, number)
	}
	f := fixture(t, o)
	files := o.IDs.HostID(0)
	base := func(number int) int { return files + number*idmap.SandboxIDs }
	for i, id := range []string{"one", "two", "three"} {
		if got := start(t, f, id); got != base(i+1) {
			t.Errorf("root of sandbox %s is %d, want %d", id, got, base(i+1))
		}
	}
	// One that has ended, and still has its files.
	if err := f.Engine.Kill(t.Context(), "two"); err != nil {
		t.Fatal(err)
	}
	if got := start(t, f, "four"); got != base(2) {
		t.Errorf("root of a sandbox after the second has ended is %d, want %d", got, base(2))
	}
	st, pid, err := run(t, f.Engine.Start, f.NewSpec(t, "two"))
	if err != nil {
		t.Fatal(err)
	}
	if got := rootOf(t, pid); got != base(4) || st.Enforced.IDs != api.IDsOwn {
		t.Errorf("root of one that is started again is %d, want %d; its ids are %q", got, base(4), st.Enforced.IDs)
	}
	end(t, f.Engine, "one")

	// Starts that fail at every step: of a name that is taken, of one that runs, of nothing, of layers
	// that are missing, of a profile that init cannot apply.
	bad := f.NewSpec(t, "bad")
	bad.Rootfs.Layers = []string{"sha256:" + strings.Repeat("0", 64)}
	unconfined := f.NewSpec(t, "bad")
	unconfined.Profile.Mounts = []api.Scratch{{Path: "/tmp", Size: 4096, Mode: 0o1777, UID: 1 << 20, GID: 1 << 20}}
	for range 3 {
		for what, err := range map[string]error{
			"a name that is taken": second(run(t, f.Engine.Create, f.NewSpec(t, "three"))),
			"one that runs":        second(run(t, f.Engine.Start, f.NewSpec(t, "three"))),
			"nothing":              second(run(t, f.Engine.Start, f.NewSpec(t, "never"))),
			"missing layers":       second(run(t, f.Engine.Create, bad)),
			"a mount that fails":   second(run(t, f.Engine.Create, unconfined)),
		} {
			if err == nil {
				t.Errorf("start of %s succeeds", what)
			}
		}
	}
	if got := start(t, f, "five"); got != base(1) {
		t.Errorf("root of a sandbox after failed starts is %d, want %d", got, base(1))
	}
	for i := range 5 { // one after the other
		id := "turn" + strconv.Itoa(i)
		if got := start(t, f, id); got != base(5) {
			t.Errorf("root of sandbox %s is %d, want %d", id, got, base(5))
		}
		end(t, f.Engine, id)
	}
	// The first range came with the launcher; none was asked for twice.
	if asked != 4 {
		t.Errorf("ranges were asked for %d times, want 4", asked)
	}
	end(t, f.Engine, "two", "three", "four", "five")
}

func second(_ *runtime.Started, _ int, err error) error { return err }

// Sandboxes that start at once get a range each, which is asked for once.
func TestRangesForManyAtOnce(t *testing.T) {
	testenv.RequireOwnIDs(t)
	o := options(t)
	var mu sync.Mutex
	asked := make(map[int]int)
	o.MountRange = func(ctx context.Context, number int) ([]*os.File, error) {
		mu.Lock()
		asked[number]++
		mu.Unlock()
		return launcher.MountRange(ctx, o, number)
	}
	f := fixture(t, o)
	const many = 8
	pids := make([]int, many)
	errs := make([]error, many)
	var ids []string
	var all sync.WaitGroup
	for i := range many {
		spec := f.NewSpec(t, "many"+strconv.Itoa(i))
		ids = append(ids, spec.ID)
		all.Go(func() { _, pids[i], errs[i] = run(t, f.Engine.Create, spec) })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	roots := make(map[int]string)
	for i, pid := range pids {
		root := rootOf(t, pid)
		if other := roots[root]; other != "" {
			t.Errorf("%s and %s run under %d", other, ids[i], root)
		}
		roots[root] = ids[i]
	}
	for number, times := range asked {
		if times != 1 || number > many {
			t.Errorf("range %d was asked for %d times", number, times)
		}
	}
	end(t, f.Engine, ids...)
}

// Ranges stay with their sandboxes when daemons come and go, and a new launcher begins anew.
func TestRangesOutliveTheDaemon(t *testing.T) {
	testenv.RequireOwnIDs(t)
	o := options(t)
	f := fixture(t, o)
	client := f.Engine.(*launcher.Client)
	one, two := start(t, f, "one"), start(t, f, "two")
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	next, started, err := launcher.Connect(t.Context(), o)
	if err != nil || started {
		t.Fatalf("a launcher was started: %v, %v", started, err)
	}
	defer func() {
		if err := next.Close(); err != nil {
			t.Error(err)
		}
	}()
	f.Engine = next
	three := start(t, f, "three")
	if slices.Contains([]int{one, two}, three) {
		t.Errorf("root of the third is %d, and of the others %d and %d", three, one, two)
	}
	end(t, next, "one")
	if four := start(t, f, "four"); four != one {
		t.Errorf("root of the fourth is %d, and %d is free", four, one)
	}
	info, err := next.Describe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(info.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := next.Died(t.Context()); err != nil {
		t.Fatal(err)
	}
	if five := start(t, f, "five"); five != one {
		t.Errorf("root of the first sandbox of a new launcher is %d, not %d", five, one)
	}
	// Nothing of the mounts is on the host.
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(data), o.DataDir) || strings.Contains(string(data), "idmapped") && strings.Contains(string(data), "/ranges/") {
		t.Errorf("the host has mounts of the launcher:\n%s", data)
	}
	end(t, next, "two", "three", "four", "five")
}

// When every range has a sandbox, the next creation is refused rather than let share.
func TestRangesAreBounded(t *testing.T) {
	testenv.RequireOwnIDs(t)
	o := options(t)
	o.IDs.UID, o.IDs.GID = slices.Clone(o.IDs.UID), slices.Clone(o.IDs.GID)
	for _, m := range [][]idmap.Range{o.IDs.UID, o.IDs.GID} {
		m[0].Size = min(m[0].Size, 3*idmap.SandboxIDs+1) // two beside that of the files
	}
	if o.IDs.Ranges() != 2 {
		t.Skip("the ids of \"sandboxd\" lie in pieces")
	}
	f := fixture(t, o)
	start(t, f, "one")
	two := start(t, f, "two")
	if _, _, err := run(t, f.Engine.Create, f.NewSpec(t, "three")); !errors.Is(err, runtime.ErrTooMany) {
		t.Errorf("a sandbox without a range: %v", err)
	}
	end(t, f.Engine, "two")
	if three := start(t, f, "three"); three != two {
		t.Errorf("root of the third is %d, want %d", three, two)
	}
	end(t, f.Engine, "one", "three")
}

// unmapped returns a broker's part that makes mounts with these attributes and without a map.
func unmapped(attrs uint64) func(context.Context, launcher.Options, int) ([]*os.File, error) {
	return func(_ context.Context, o launcher.Options, _ int) (mounts []*os.File, err error) {
		for _, d := range []string{"layers", "sandboxes"} {
			fd, err := unix.OpenTree(unix.AT_FDCWD, filepath.Join(o.DataDir, d), unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
			if err != nil {
				return nil, err
			}
			if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: attrs}); err != nil {
				return nil, err
			}
			mounts = append(mounts, os.NewFile(uintptr(fd), d))
		}
		return mounts, nil
	}
}

// The launcher takes only mounts of the range that it has asked for: a daemon that was taken
// over passes them on.
func TestLauncherVerifiesMountsOfRanges(t *testing.T) {
	testenv.RequireOwnIDs(t)
	for name, tt := range map[string]struct {
		mounts func(ctx context.Context, o launcher.Options, number int) ([]*os.File, error)
		says   string
	}{
		"of another range": {func(ctx context.Context, o launcher.Options, number int) ([]*os.File, error) {
			return launcher.MountRange(ctx, o, number+1)
		}, "is seen as"},
		"in the wrong order": {func(ctx context.Context, o launcher.Options, number int) ([]*os.File, error) {
			mounts, err := launcher.MountRange(ctx, o, number)
			slices.Reverse(mounts)
			return mounts, err
		}, "another directory"},
		"without a map":     {unmapped(unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSYMFOLLOW), "is seen as"},
		"that follow links": {unmapped(unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV), "its flags are"},
		"that are no mounts": {func(_ context.Context, o launcher.Options, _ int) (files []*os.File, err error) {
			for _, d := range []string{"layers", "sandboxes"} {
				f, err := os.Open(filepath.Join(o.DataDir, d))
				if err != nil {
					return nil, err
				}
				files = append(files, f)
			}
			return files, nil
		}, "attach layers"},
		"only one": {func(ctx context.Context, o launcher.Options, number int) ([]*os.File, error) {
			mounts, err := launcher.MountRange(ctx, o, number)
			if err == nil {
				err = mounts[1].Close()
				mounts = mounts[:1]
			}
			return mounts, err
		}, "descriptors"},
	} {
		t.Run(name, func(t *testing.T) {
			o := options(t)
			mount := tt.mounts
			o.MountRange = func(ctx context.Context, number int) ([]*os.File, error) { return mount(ctx, o, number) }
			f := fixture(t, o)
			start(t, f, "one")
			if _, _, err := run(t, f.Engine.Create, f.NewSpec(t, "two")); err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("a sandbox on mounts %s: %v, want %q", name, err, tt.says)
			}
			mount = launcher.MountRange // nothing is left of the attempt
			start(t, f, "two")
			end(t, f.Engine, "one", "two")
		})
	}
}

// A link that a daemon has put in the place of the launcher's directory is not mounted, nor is a
// directory of another owner.
func TestRangesHaveFixedDirectories(t *testing.T) {
	testenv.RequireOwnIDs(t)
	o := options(t)
	owned := func(dir string) error {
		return errors.Join(os.Mkdir(dir, 0o700), os.Lchown(dir, o.IDs.UID[0].Outside, o.IDs.GID[0].Outside))
	}
	for name, replace := range map[string]func(dir string) error{
		"link":            func(dir string) error { return errors.Join(owned(dir+"-other"), os.Symlink(dir+"-other", dir)) },
		"other directory": func(dir string) error { return os.Mkdir(dir, 0o700) },
	} {
		t.Run(name, func(t *testing.T) {
			o := o
			o.DataDir = shortDir(t)
			for _, d := range []string{"layers", "sandboxes"} {
				if err := replace(filepath.Join(o.DataDir, d)); err != nil {
					t.Fatal(err)
				}
			}
			if mounts, err := launcher.MountRange(t.Context(), o, 1); err == nil {
				t.Errorf("it is mounted: %v", mounts)
			}
		})
	}
}

// Where no mounts can be mapped all sandboxes share one range, and say so.
func TestSharedRangeIsSaid(t *testing.T) {
	testenv.RequireOwnIDs(t)
	o := options(t)
	o.IDs.UID, o.IDs.GID = slices.Clone(o.IDs.UID), slices.Clone(o.IDs.GID)
	for _, m := range [][]idmap.Range{o.IDs.UID, o.IDs.GID} {
		m[0].Size = idmap.SandboxIDs + 1
	}
	f := fixture(t, o)
	one, pid, err := run(t, f.Engine.Create, f.NewSpec(t, "one"))
	if err != nil {
		t.Fatal(err)
	}
	if got := start(t, f, "two"); got != rootOf(t, pid) || got != o.IDs.HostID(0) {
		t.Errorf("roots are %d and %d, want %d", got, rootOf(t, pid), o.IDs.HostID(0))
	}
	if missing := strings.Join(one.Enforced.Missing, "; "); one.Enforced.IDs != api.IDsShared || !strings.Contains(missing, "own ids: ") {
		t.Errorf("its ids are %q, and missing is %q", one.Enforced.IDs, missing)
	}
	end(t, f.Engine, "one", "two")
}
