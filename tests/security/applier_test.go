package security

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/idmap"
	"github.com/sandboxd/sandboxd/internal/kernel"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/internal/rootfs"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// The unpacker reads the most hostile input there is. Here it is taken over: the program that the
// launcher starts for it (command applier) attacks from the place where the product begins to
// read, and reports the attacks that worked. Before the confinement everything works; without the
// filter, or without Landlock, the other still holds.
func TestUnpackerIsConfined(t *testing.T) {
	testenv.RequireUserNS(t)
	a := newApplier(t)
	control := a.attack(t, "control")
	for name, result := range control {
		if name != "read-layer-below" && name != "write-layer-below" && result != "worked" { // not open there yet
			t.Errorf("control: %s does not work where nothing holds it: %s", name, result)
		}
	}
	if len(control) < 40 {
		t.Errorf("control: only %d attacks", len(control))
	}

	noLandlock := worked(a.attack(t, "no-landlock"))
	// The control for Landlock: what only it holds. All of it takes a descriptor that should not be
	// there, but a socket among the layer's files and reading what lies below.
	if diff := cmp.Diff([]string{
		"create-outside-descriptor", "make-socket-file", "read-layer-below", "read-outside-descriptor", "remove-outside-descriptor",
		"write-outside-descriptor",
	}, noLandlock); diff != "" {
		t.Errorf("worked without Landlock (-want +got):\n%s", diff)
	}

	abi, err := kernel.LandlockABI()
	landlock := err == nil && abi >= kernel.LandlockRefer
	for name, result := range a.attack(t, "confined") {
		if result == "worked" && (landlock || !slices.Contains(noLandlock, name)) {
			t.Errorf("%s worked", name)
		}
	}

	testenv.RequireLandlock(t, kernel.LandlockRefer)
	noFilter := a.attack(t, "no-filter")
	for _, name := range append(noLandlock, "execve", "open-outside-path", "open-outside-dotdot", "mount", "chroot") {
		if noFilter[name] == "worked" {
			t.Errorf("%s worked without the filter", name)
		}
	}
	// The control for the filter.
	for _, name := range []string{"socket-inet", "socket-unix", "fork", "clone-user", "ptrace", "process-vm-readv", "memfd", "dumpable"} {
		if noFilter[name] != "worked" {
			t.Errorf("control: %s without the filter: %s", name, noFilter[name])
		}
	}
}

// The child that reads a sandbox's changes reads names and contents that the whole sandbox chose.
func TestDifferIsConfined(t *testing.T) {
	testenv.RequireUserNS(t)
	a := newApplier(t)
	a.outside = filepath.Join(a.dir, "sandboxes", "outside")
	if err := os.Mkdir(a.outside, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(a.outside, 0o777); err != nil { // the umask
		t.Fatal(err)
	}
	control := a.attackDiff(t, "attackcontrol")
	for _, name := range []string{"read-outside-descriptor", "write-outside-descriptor", "create-outside-descriptor", "remove-outside-descriptor", "make-socket-file", "socket-inet", "fork", "mount"} {
		if control[name] != "worked" {
			t.Errorf("control: %s does not work where nothing holds it: %s", name, control[name])
		}
	}

	// The control for Landlock: what only it holds. Its filter knows no call that makes or removes
	// names, but openat(2) does.
	noLandlock := worked(a.attackDiff(t, "attacknolandlock"))
	if diff := cmp.Diff([]string{
		"create-outside-descriptor", "read-layer-below", "read-outside-descriptor", "write-outside-descriptor",
	}, noLandlock); diff != "" {
		t.Errorf("worked without Landlock (-want +got):\n%s", diff)
	}

	abi, err := kernel.LandlockABI()
	landlock := err == nil && abi >= kernel.LandlockRefer
	for name, result := range a.attackDiff(t, "attackconfined") {
		if result == "worked" && (landlock || !slices.Contains(noLandlock, name)) {
			t.Errorf("%s worked", name)
		}
	}

	testenv.RequireLandlock(t, kernel.LandlockRefer)
	noFilter := a.attackDiff(t, "attacknofilter")
	for _, name := range append(noLandlock, "remove-outside-descriptor", "make-socket-file", "execve", "open-outside-path", "open-outside-dotdot", "mount", "chroot") {
		if noFilter[name] == "worked" {
			t.Errorf("%s worked without the filter", name)
		}
	}
	for _, name := range []string{"socket-inet", "fork", "memfd"} {
		if noFilter[name] != "worked" {
			t.Errorf("control: %s without the filter: %s", name, noFilter[name])
		}
	}
}

func worked(results map[string]string) []string {
	maps.DeleteFunc(results, func(_, result string) bool { return result != "worked" })
	return slices.Sorted(maps.Keys(results))
}

// A kernel without Landlock unpacks all the same, with one fence less; the doctor says so.
func TestLayersAreUnpackedWithoutLandlock(t *testing.T) {
	testenv.RequireUserNS(t)
	a := newApplier(t)
	stream := harness.Tar(t, harness.File{Name: "a/file", Body: "x"}, harness.File{Name: "b/link", Type: tar.TypeLink, Link: "a/file"})
	for _, mediaType := range []string{"plain/tar", "plain/no-landlock.tar"} {
		result, err := a.apply(t, mediaType, stream, a.parent)
		if err != nil || result.Entries != 4 {
			t.Errorf("%s: %+v, %v", mediaType, result, err)
		}
	}
}

type applier struct {
	client  *launcher.Client
	dir     string // where the launcher keeps its data
	outside string // a directory of the host that every user may write to
	parent  string // chain id of a layer
	applied []string
}

func newApplier(t *testing.T) *applier {
	t.Helper()
	// Not t.TempDir: the launcher, which is not root of the host, must be able to enter it.
	dir, err := os.MkdirTemp("", "applier") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("left behind: %v", err)
		}
	})
	a := &applier{dir: dir, outside: filepath.Join(dir, "outside")}
	for _, d := range []string{dir, a.outside, filepath.Join(dir, "run")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(a.outside, 0o777); err != nil {
		t.Fatal(err)
	}
	ids, err := idmap.Detect()
	if err != nil {
		t.Fatal(err)
	}
	a.client, _, err = launcher.Connect(t.Context(), launcher.Options{
		DataDir: dir, RuntimeDir: filepath.Join(dir, "run"), Launcher: harness.Helper(t, "applier"), Init: harness.Program(t, "sandboxd-init"),
		IDs: ids, Version: "test",
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testenv.HungAfter)
		defer cancel()
		for _, chain := range a.applied {
			if err := a.client.RemoveLayer(ctx, chain); err != nil {
				t.Error(err)
			}
		}
		if err := a.client.Shutdown(ctx); err != nil {
			t.Error(err)
		}
	})
	if _, err := a.apply(t, "plain/tar", harness.Tar(t, harness.File{Name: "below/file", Body: "x"})); err != nil {
		t.Fatal(err)
	}
	a.parent = a.applied[0]
	return a
}

func (a *applier) apply(t *testing.T, mediaType string, stream []byte, parents ...string) (layer.Result, error) {
	t.Helper()
	blob, err := os.CreateTemp(t.TempDir(), "layer")
	if err != nil {
		t.Fatal(err)
	}
	defer blob.Close()
	if _, err := blob.WriteAt(stream, 0); err != nil {
		t.Fatal(err)
	}
	return a.send(t, mediaType, blob, parents)
}

func (a *applier) send(t *testing.T, mediaType string, blob *os.File, parents []string) (layer.Result, error) {
	t.Helper()
	chain := fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(mediaType+strings.Join(parents, ""))))
	results, err := a.client.Apply(t.Context(), layer.ApplyRequest{
		Parents: parents, Layers: []layer.Request{{ChainID: chain, MediaType: mediaType, Blob: blob}},
	})
	if err != nil {
		return layer.Result{}, err
	}
	a.applied = append(a.applied, chain)
	return results[0], nil
}

// attack has the unpacker attack, with a directory of the host in the place of the layer's stream,
// and looks at that afterwards: an attack reported as refused must not have happened.
func (a *applier) attack(t *testing.T, order string) map[string]string {
	t.Helper()
	return a.run(t, order, func() error {
		dir, err := os.Open(a.outside)
		if err != nil {
			t.Fatal(err)
		}
		defer dir.Close()
		_, err = a.send(t, "attack/"+order, dir, []string{a.parent})
		return err
	})
}

// attackDiff has what reads a sandbox attack, with another one's directory as its standard input.
func (a *applier) attackDiff(t *testing.T, id string) map[string]string {
	t.Helper()
	upper := filepath.Join(a.dir, "sandboxes", id, "upper")
	if err := os.MkdirAll(upper, 0o755); err != nil {
		t.Fatal(err)
	}
	return a.run(t, id, func() error {
		_, err := a.client.WriteDiff(t.Context(), runtime.DiffRequest{ID: id, Rootfs: rootfs.Source{Layers: []string{a.parent}}}, io.Discard)
		return err
	})
}

// run plants files outside, has the attack happen, and compares the report with the state of the
// files.
func (a *applier) run(t *testing.T, order string, attack func() error) map[string]string {
	t.Helper()
	for name, body := range map[string]string{"planted": "the host's", "removed": "not yet"} {
		path := filepath.Join(a.outside, name)
		if err := os.WriteFile(path, []byte(body), 0o666); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, 0o666); err != nil { // the umask
			t.Fatal(err)
		}
	}
	err := attack()
	if err == nil {
		t.Fatalf("%s: it did its work instead", order)
	}
	_, list, ok := strings.Cut(err.Error(), "ATTACKS:")
	results := make(map[string]string)
	if err := json.Unmarshal([]byte(list), &results); err != nil || !ok {
		t.Fatalf("%s: no results in %q: %v", order, list, err)
	}
	for name, refused := range results {
		t.Logf("%s: %s: %s", order, name, refused)
	}

	body, err := os.ReadFile(filepath.Join(a.outside, "planted"))
	if err != nil {
		t.Fatal(err)
	}
	if changed := !bytes.Equal(body, []byte("the host's")); changed != (results["write-outside-descriptor"] == "worked") {
		t.Errorf("%s: the planted file was changed: %v, the attack says %s", order, changed, results["write-outside-descriptor"])
	}
	for file, attack := range map[string]string{"created": "create-outside-descriptor", "socket": "make-socket-file"} {
		err := os.Remove(filepath.Join(a.outside, file))
		if made := err == nil; made != (results[attack] == "worked") {
			t.Errorf("%s: %s was made: %v, the attack says %s", order, file, made, results[attack])
		}
	}
	_ = os.Remove(filepath.Join(a.outside, "program"))
	return results
}
