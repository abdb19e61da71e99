// Package engine runs the contract suite of runtime.Engine on the real one: the launcher's binary,
// libcontainer, and the sandbox's init, on this host's kernel.
package engine

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/kernel"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/internal/testenv"
	ociprofiles "github.com/sandboxd/sandboxd/oci-profiles"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
	"github.com/sandboxd/sandboxd/runtime/runtimetest"
	"github.com/sandboxd/sandboxd/seccomp"
	"github.com/sandboxd/sandboxd/tests/harness"
)

func TestMain(m *testing.M) {
	if code, ok := kernel.Main(os.Args[1:]); ok {
		os.Exit(code)
	}
	os.Exit(m.Run())
}

func TestEngineKeepsItsContract(t *testing.T) {
	testenv.RequireUserNS(t)
	runtimetest.RunEngineSuite(t, func(t *testing.T) runtimetest.Fixture {
		t.Helper()
		return newFixture(t)
	})
}

// An error that stops the launcher before it serves is reported all the same.
func TestLauncherSaysWhyItCannotStart(t *testing.T) {
	testenv.RequireUserNS(t)
	o := options(t)
	o.Init = filepath.Join(o.DataDir, "no-init")
	_, _, err := launcher.Connect(t.Context(), o)
	if err == nil || !strings.Contains(err.Error(), o.Init+": no such file") {
		t.Errorf("start without an init: %v", err)
	}
}

// A deadline that is put off does not strike at the old time, and one that is brought forward
// strikes, without any daemon.
func TestDeadlinesOfTheLauncher(t *testing.T) {
	testenv.RequireUserNS(t)
	f := newFixture(t)
	// Where a machine that has much else to do takes longer to start two sandboxes, they get more
	// time.
	soon := 3 * time.Second
	for round := 0; !deadlines(t, f, fmt.Sprint(round), soon); round++ {
		if soon *= 3; soon > testenv.HungAfter {
			t.Fatal("the host starts no two sandboxes in time")
		}
	}
}

// deadlines starts two sandboxes, one of which is to end soon, and changes their deadlines; it
// reports false where it could not do so before the first came.
func deadlines(t *testing.T, f runtimetest.Fixture, round string, soon time.Duration) bool {
	t.Helper()
	began := time.Now()
	remove := func(id string) {
		ctx, cancel := context.WithTimeout(context.Background(), testenv.HungAfter)
		defer cancel()
		if err := f.Engine.Delete(ctx, id); err != nil {
			t.Error(err)
		}
	}
	putoff, forward := "putoff"+round, "forward"+round
	for id, first := range map[string]time.Duration{putoff: soon, forward: time.Hour} {
		spec := f.NewSpec(t, id)
		spec.Deadline = began.Add(first)
		control := filepath.Join(t.TempDir(), "s")
		l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: control, Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		file, err := l.File()
		if err != nil {
			t.Fatal(err)
		}
		st, err := f.Engine.Create(t.Context(), spec, file)
		_, _ = l.Close(), file.Close() // the sandbox has its own
		if err != nil {
			t.Fatal(err)
		}
		_ = st.Pidfd.Close()
		defer remove(id)
	}
	for id, deadline := range map[string]time.Time{putoff: began.Add(time.Hour), forward: began.Add(soon + 500*time.Millisecond)} {
		_, err := f.Engine.Update(t.Context(), id, &runtime.Change{Deadline: deadline})
		if late := time.Since(began); late > soon {
			t.Logf("%s were not enough for two sandboxes: it took %s, and then %v", soon, late, err)
			return false
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	// The one that is brought forward ends after the old deadline of the other.
	harness.Eventually(t, func() error {
		list, err := f.Engine.List(t.Context())
		if err != nil {
			return err
		}
		var ids []string
		for _, st := range list {
			ids = append(ids, st.ID)
			_ = st.Pidfd.Close()
		}
		if !slices.Equal(ids, []string{putoff}) {
			return fmt.Errorf("%v run", ids)
		}
		return nil
	})
	return true
}

// Layers of one request are all kept or none. An upper one takes the attributes of a lower one,
// whichever is unpacked first.
func TestLayersThatComeTogether(t *testing.T) {
	testenv.RequireUserNS(t)
	opts := options(t)
	layers := filepath.Join(opts.DataDir, "layers")
	client, _, err := launcher.Connect(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testenv.HungAfter)
		defer cancel()
		if err := client.Shutdown(ctx); err != nil {
			t.Error(err)
		}
	})
	// The lower one takes long, those above are read at once.
	big := strings.Repeat("0123456789abcdef", 1<<20)
	lower := harness.Tar(t, harness.File{Name: "big", Body: big}, harness.File{Name: "dir/", Type: tar.TypeDir, Mode: 0o1750}, harness.File{Name: "gone"})
	middle := harness.Tar(t, harness.File{Name: "dir/file", Body: "xyz"}, harness.File{Name: ".wh.gone"}, harness.File{Name: ".wh.never"}, harness.File{Name: "other/", Type: tar.TypeDir, Mode: 0o711})
	upper := harness.Tar(t, harness.File{Name: "dir/file", Body: "xy"}, harness.File{Name: "other/file"})
	request := func(streams ...[]byte) (req layer.ApplyRequest) {
		name := ""
		for _, stream := range streams {
			blob, err := os.CreateTemp(t.TempDir(), "layer")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = blob.Close() })
			if _, err := blob.WriteAt(stream, 0); err != nil {
				t.Fatal(err)
			}
			sum := sha256.Sum256(append([]byte(name), stream...))
			name = "sha256:" + hex.EncodeToString(sum[:])
			req.Layers = append(req.Layers, layer.Request{ChainID: name, MediaType: "application/vnd.oci.image.layer.v1.tar", Blob: blob})
		}
		return req
	}
	dir := func(chainID string) string {
		return filepath.Join(layers, strings.TrimPrefix(chainID, "sha256:"))
	}
	list := func() (names []string) {
		entries, err := os.ReadDir(layers)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}

	before := list()
	bad := request(lower, middle, []byte("no layer at all, and not even a block of one"), upper)
	if results, err := client.Apply(t.Context(), bad); !errors.Is(err, layer.ErrInvalid) || len(results) != 2 {
		t.Errorf("a bad third layer: %d results, %v", len(results), err)
	}
	if diff := cmp.Diff(before, list()); diff != "" {
		t.Errorf("left behind (-before +after):\n%s", diff)
	}

	// None of them is too much alone; the second one is done when the lowest, which takes long, is.
	// The third, which may begin before that, would fit without the second.
	full := layer.Limits{Bytes: int64(len(big)) + 4096, Below: layer.Usage{Bytes: 4096}}
	nearly := full
	nearly.Bytes += 3 - 1
	for limit, limits := range map[layer.Exceeded]layer.Limits{
		layer.ExceededEntries: {Entries: 3 + 5 - 1}, layer.ExceededBytes: nearly,
	} {
		over := request(lower, middle, upper)
		for i := range over.Layers {
			over.Layers[i].Limits = limits
		}
		results, err := client.Apply(t.Context(), over)
		if got, ok := errors.AsType[layer.Exceeded](err); !ok || got != limit || len(results) != 1 {
			t.Errorf("%+v, which the second layer exceeds: %d results, %v", limits, len(results), err)
		}
	}
	if diff := cmp.Diff(before, list()); diff != "" {
		t.Errorf("left behind (-before +after):\n%s", diff)
	}

	req := request(lower, middle, upper)
	results, err := client.Apply(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if len(results) != 3 || results[0].Size != int64(len(big)) || results[1].Size != 3 || results[2].Size != 2 {
		t.Errorf("results %+v", results)
	}
	for name, want := range map[string]os.FileMode{
		"1/dir": os.ModeDir | os.ModeSticky | 0o750, "2/dir": os.ModeDir | os.ModeSticky | 0o750, "2/other": os.ModeDir | 0o711,
		"1/gone": os.ModeDevice | os.ModeCharDevice, "1/never": 0, "2/gone": 0,
	} {
		fi, err := os.Lstat(filepath.Join(dir(req.Layers[name[0]-'0'].ChainID), name[2:]))
		switch {
		case want == 0 && !errors.Is(err, os.ErrNotExist):
			t.Errorf("%s: %v, %v, want nothing", name, fi, err)
		case want != 0 && (err != nil || fi.Mode().Type() != want.Type() || want.IsDir() && fi.Mode() != want):
			t.Errorf("%s: %v, %v, want %v", name, fi, err, want)
		}
	}
	// Again, with one on top: existing layers stay, and count whether or not the client knows their
	// usage.
	more := request(lower, middle, upper, upper)
	more.Layers[3].Limits = full
	if results, err = client.Apply(t.Context(), more); !errors.Is(err, layer.ExceededBytes) || len(results) != 3 {
		t.Errorf("with what is there it is too much: %d results, %v", len(results), err)
	}
	more = request(lower, middle, upper, upper)
	if results, err = client.Apply(t.Context(), more); err != nil || results[0].DiffID != "" || results[0].Size != int64(len(big)) || results[2].DiffID != "" || results[3].DiffID == "" {
		t.Errorf("again: %+v, %v", results, err)
	}
	for _, l := range more.Layers {
		if err := client.RemoveLayer(t.Context(), l.ChainID); err != nil {
			t.Error(err)
		}
	}
	// For a layer that an earlier launcher has made, the client's numbers count.
	more = request(lower, upper)
	more.Layers[0].Known, more.Layers[1].Limits = layer.Usage{Bytes: int64(len(big))}, full
	if err := os.Mkdir(dir(more.Layers[0].ChainID), 0o755); err != nil {
		t.Fatal(err)
	}
	if results, err = client.Apply(t.Context(), more); !errors.Is(err, layer.ExceededBytes) || len(results) != 1 || results[0].Size != int64(len(big)) {
		t.Errorf("with what an earlier one has made it is too much: %+v, %v", results, err)
	}
	if err := client.RemoveLayer(t.Context(), more.Layers[0].ChainID); err != nil {
		t.Error(err)
	}
	for n, r := range map[string]layer.ApplyRequest{"none": {}, "too many": {Layers: make([]layer.Request, layer.MaxApply+1)}} {
		for i := range r.Layers {
			r.Layers[i] = req.Layers[0]
		}
		if _, err := client.Apply(t.Context(), r); err == nil || !strings.Contains(err.Error(), "1 to 64") {
			t.Errorf("%s: %v", n, err)
		}
	}
}

// The changes of a sandbox can be read while it runs and after its end, and the layer can be
// applied.
func TestDiff(t *testing.T) {
	testenv.RequireUserNS(t)
	f := newFixture(t)
	client := f.Engine.(*launcher.Client)
	create(t, f, "diff1")
	ask := runtime.DiffRequest{ID: "diff1", Rootfs: f.NewSpec(t, "diff1").Rootfs, Freeze: true}
	var stream bytes.Buffer
	first, err := client.WriteDiff(t.Context(), ask, &stream)
	if err != nil {
		t.Fatal(err)
	}
	// The layer of the tests has no places for these, so they were made.
	var changes []string
	if _, err := client.ListDiff(t.Context(), ask, func(c api.Change) error {
		changes = append(changes, fmt.Sprintf("%s %s %s", c.Kind, c.Type, c.Path))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	want := []string{"added directory /dev", "added directory /proc", "added directory /sys"}
	if !slices.Equal(changes, want) {
		t.Errorf("changes are %q, want %q", changes, want)
	}
	var names []string
	for r := tar.NewReader(bytes.NewReader(stream.Bytes())); ; {
		hdr, err := r.Next()
		if err != nil {
			break
		}
		if hdr.Uid != 0 || hdr.Gid != 0 {
			t.Errorf("%s belongs to %d:%d: not the sandbox's own ids", hdr.Name, hdr.Uid, hdr.Gid)
		}
		names = append(names, hdr.Name)
	}
	if want := []string{"dev/", "proc/", "sys/"}; !slices.Equal(names, want) {
		t.Errorf("the layer has %q, want %q", names, want)
	}

	if err := client.Kill(t.Context(), "diff1"); err != nil {
		t.Fatal(err)
	}
	if again, err := client.WriteDiff(t.Context(), ask, io.Discard); err != nil || again.DiffID != first.DiffID {
		t.Errorf("after its end: %+v, %v; before: %+v", again, err, first)
	}
	full := errors.New("no room")
	if _, err := client.WriteDiff(t.Context(), ask, failing{full}); !errors.Is(err, full) {
		t.Errorf("a writer that fails: %v", err)
	}
	blob, err := os.CreateTemp(t.TempDir(), "layer")
	if err != nil {
		t.Fatal(err)
	}
	defer blob.Close()
	if _, err := blob.WriteAt(stream.Bytes(), 0); err != nil {
		t.Fatal(err)
	}
	applied, err := client.Apply(t.Context(), layer.ApplyRequest{Parents: []string{chain}, Layers: []layer.Request{{
		ChainID: first.DiffID, DiffID: first.DiffID, MediaType: "application/vnd.oci.image.layer.v1.tar", Blob: blob,
	}}})
	if err != nil || applied[0].Entries != first.Entries {
		t.Errorf("applied: %+v, %v; made: %+v", applied, err, first)
	}
	if err := client.RemoveLayer(t.Context(), first.DiffID); err != nil {
		t.Error(err)
	}
	for id, wantErr := range map[string]error{"unknown1": runtime.ErrNotFound, "../layers": nil, "": nil} {
		ask.ID = id
		if _, err := client.WriteDiff(t.Context(), ask, io.Discard); err == nil || wantErr != nil && !errors.Is(err, wantErr) {
			t.Errorf("sandbox %q: %v", id, err)
		}
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

// create starts a sandbox that ends with the test.
func create(t *testing.T, f runtimetest.Fixture, id string) {
	t.Helper()
	begin(t, f, f.NewSpec(t, id))
}

// shortDir is like t.TempDir, but the launcher, which is not root of the host, can enter it. The
// test's name is not in its path, which would be too long for a socket's.
func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "engine") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("left behind: %v", err)
		}
	})
	return dir
}

func options(t testing.TB) launcher.Options {
	t.Helper()
	dir := shortDir(t)
	run := filepath.Join(dir, "run")
	if err := os.Mkdir(run, 0o700); err != nil {
		t.Fatal(err)
	}
	ids, err := idmap.Detect()
	if err != nil {
		t.Fatal(err)
	}
	return launcher.Options{
		DataDir: dir, RuntimeDir: run, Launcher: harness.Program(t, "sandboxd-launcher"), Init: harness.Program(t, "sandboxd-init"),
		IDs: ids, Cgroup: cgroup.Subtree{Mount: cgroupMount(t)}, Version: "test",
	}
}

func newFixture(t testing.TB) runtimetest.Fixture {
	t.Helper()
	return fixture(t, options(t))
}

func fixture(t testing.TB, o launcher.Options) runtimetest.Fixture {
	t.Helper()
	client, _, err := launcher.Connect(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testenv.HungAfter)
		defer cancel()
		// The files of layers and sandboxes belong to ids that only the launcher may remove.
		if err := client.RemoveLayer(ctx, chain); err != nil {
			t.Error(err)
		}
		if err := client.Shutdown(ctx); err != nil {
			t.Error(err)
		}
	})
	applyLayer(t, client)
	actions, err := kernel.SeccompActions()
	if err != nil {
		t.Fatal(err)
	}
	profiles, err := ociprofiles.Open("", seccomp.Abilities{Actions: actions})
	if err != nil {
		t.Fatal(err)
	}
	profile, err := profiles.Get(ociprofiles.Default)
	if err != nil {
		t.Fatal(err)
	}
	return runtimetest.Fixture{Engine: client, NewSpec: func(_ *testing.T, id string) *runtime.Spec {
		return &runtime.Spec{
			ID: id, Rootfs: rootfs.Source{Layers: []string{chain}}, Hostname: id, Profile: profile.Profile,
			Limits: api.Limits{Pids: 64, Nofile: 1024}, Deadline: time.Now().Add(time.Hour),
		}
	}}
}

// cgroupMount is the mount point of cgroup v2; the suite runs without a subtree of its own.
func cgroupMount(t testing.TB) string {
	t.Helper()
	c, err := kernel.ProbeCgroup()
	if err != nil {
		t.Fatal(err)
	}
	return c.Mount
}

// layerTar is a layer with nothing but an empty directory: the sandbox's init comes from the
// launcher.
var layerTar, chain = func() ([]byte, string) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "tmp/", Mode: 0o1777}); err != nil {
		panic(err)
	}
	if err := w.Close(); err != nil {
		panic(err)
	}
	sum := sha256.Sum256(buf.Bytes())
	return buf.Bytes(), "sha256:" + hex.EncodeToString(sum[:])
}()

func applyLayer(t testing.TB, client *launcher.Client) {
	t.Helper()
	blob, err := os.CreateTemp(t.TempDir(), "layer")
	if err != nil {
		t.Fatal(err)
	}
	defer blob.Close()
	if _, err := blob.WriteAt(layerTar, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Apply(t.Context(), layer.ApplyRequest{Layers: []layer.Request{{
		ChainID: chain, DiffID: chain, MediaType: "application/vnd.oci.image.layer.v1.tar", Blob: blob,
	}}}); err != nil {
		t.Fatal(err)
	}
}
