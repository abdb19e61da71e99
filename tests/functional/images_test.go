package functional

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// twoLayers is an image of busybox and one small file on top, with this content.
func twoLayers(t *testing.T, says string) v1.Image {
	t.Helper()
	return harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}, WorkingDir: "/home", Cmd: []string{"cat", "/says"}},
		harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...)),
		harness.Layer(t, "zstd", harness.Tar(t, harness.File{Name: "says", Body: says})))
}

func imagesOf(t *testing.T, d *harness.Daemon) map[string]api.Image {
	t.Helper()
	var list api.ImageList
	if err := d.Call(t.Context(), http.MethodGet, "/v1/images", nil, &list); err != nil {
		t.Fatal(err)
	}
	images := make(map[string]api.Image)
	for _, i := range list.Images {
		if i.Reference != api.HostImage {
			images[i.Reference] = i
		}
	}
	return images
}

// remove takes a name away, or returns the problem.
func remove(t *testing.T, d *harness.Daemon, reference string, force bool) (api.ImagesRemoved, error) {
	t.Helper()
	var out api.ImagesRemoved
	err := d.Call(t.Context(), http.MethodDelete, fmt.Sprintf("/v1/images?reference=%s&force=%t", url.QueryEscape(reference), force), nil, &out)
	return out, err
}

func prune(t *testing.T, d *harness.Daemon, all bool) api.ImagesRemoved {
	t.Helper()
	var out api.ImagesRemoved
	if err := d.Call(t.Context(), http.MethodPost, "/v1/images/prune", api.PruneImages{All: all}, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// stored lists the names of what lies in the data directory for images: blobs and trees.
func stored(t *testing.T, d *harness.Daemon) []string {
	t.Helper()
	var names []string
	for _, dir := range []string{"blobs/blobs/sha256", "layers", "incoming"} {
		entries, err := os.ReadDir(filepath.Join(d.DataDir, dir))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			names = append(names, dir+"/"+e.Name())
		}
	}
	return names
}

func verified(t *testing.T, d *harness.Daemon) api.ImagesVerified {
	t.Helper()
	var v api.ImagesVerified
	if err := d.Call(t.Context(), http.MethodGet, "/v1/images/verify", nil, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// An image in use by a sandbox is not removed, whatever is asked for. An unused one is gone, blobs
// and trees, and its shared layers stay.
func TestRemovedImagesLeaveWhatIsNeeded(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	d.Warm(t)
	empty := stored(t, d)
	registry := harness.LyingRegistry(t, nil)
	one, two := registry.Push(t, "team/app:1", twoLayers(t, "one")), registry.Push(t, "team/app:2", twoLayers(t, "two"))
	d.MustPull(t, one)
	d.MustPull(t, two)
	list := imagesOf(t, d)
	if i := list[one]; i.SharedSize <= i.UniqueSize || i.UniqueSize <= 0 {
		t.Errorf("image one shares %d bytes and has %d alone", i.SharedSize, i.UniqueSize)
	}
	s := d.Create(t, api.CreateSandbox{Image: one})

	_, err := remove(t, d, one, false)
	wantProblem(t, err, api.CodeConflict, s.Name, one)
	if got := d.CLI(t, "rmi", one); got.Code != 1 || !strings.Contains(got.Stderr, s.Name) {
		t.Errorf("rmi of an image in use: %+v", got)
	}
	if out := prune(t, d, true); len(out.Removed) != 1 || out.Removed[0] != two || out.Bytes < 100 {
		t.Errorf("prune --all removed %+v", out)
	}
	if got := s.Sh(t, "cat /says"); got != "one" {
		t.Errorf("in the sandbox: %q", got)
	}
	// Its name can go; the image stays for as long as the sandbox is there, in any state.
	if out, err := remove(t, d, one, true); err != nil || len(out.Untagged) != 1 {
		t.Errorf("rmi --force: %+v, %v", out, err)
	}
	kill9(t, s.PID)
	s.WaitState(t, api.StateStopped)
	if out := prune(t, d, true); len(out.Removed) != 0 {
		t.Errorf("prune --all removed %+v, which a stopped sandbox has", out)
	}
	if v := verified(t, d); v.Blobs != 4 || v.Layers != 2 || len(v.Problems) != 0 {
		t.Errorf("verify says %+v", v)
	}
	s.Delete(t)
	if out := prune(t, d, false); len(out.Removed) != 1 || !strings.Contains(out.Removed[0], "@sha256:") {
		t.Errorf("prune removed %+v", out)
	}
	if left := stored(t, d); strings.Join(left, " ") != strings.Join(empty, " ") {
		t.Errorf("left of the images:\n%s\nbefore them:\n%s", strings.Join(left, "\n"), strings.Join(empty, "\n"))
	}
	_, err = remove(t, d, one, false)
	wantProblem(t, err, api.CodeNotFound, one)
	// And it can be had again.
	d.MustPull(t, one)
	if got := d.Create(t, api.CreateSandbox{Image: one}).Sh(t, "cat /says"); got != "one" {
		t.Errorf("after it was pulled anew: %q", got)
	}
}

// Layers of the host image that the host has outgrown, or that no sandbox has, go; those of
// sandboxes do not.
func TestPruneKeepsTheHostImageOfSandboxes(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	before := stored(t, d)
	d.Kill9(t) // the next daemon has not made the host image yet
	d.Launch(t)
	prune(t, d, true)
	if after := stored(t, d); strings.Join(before, " ") != strings.Join(after, " ") {
		t.Errorf("before %v, after %v", before, after)
	}
	if got := s.Sh(t, "ls /etc/passwd"); got != "/etc/passwd\n" {
		t.Errorf("in the sandbox: %q", got)
	}
	s.Delete(t)
	if d.Create(t, api.CreateSandbox{}).Sh(t, "echo x") != "x\n" {
		t.Error("no sandbox of the host image after prune")
	}
}

// A tag that moves on leaves the image that sandboxes have.
func TestPulledAnewKeepsTheOldImageForItsSandboxes(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	registry := harness.LyingRegistry(t, nil)
	reference := registry.Push(t, "team/app:latest", twoLayers(t, "old"))
	old := d.MustPull(t, reference)
	s := d.Create(t, api.CreateSandbox{Image: reference})
	registry.Push(t, "team/app:latest", twoLayers(t, "new"))
	d.MustPull(t, reference)
	name := strings.TrimSuffix(reference, ":latest") + "@" + old.Digest
	if _, ok := imagesOf(t, d)[name]; !ok {
		t.Errorf("images are %v, want %s among them", imagesOf(t, d), name)
	}
	if out := prune(t, d, false); len(out.Removed) != 0 {
		t.Errorf("prune removed %+v", out)
	}
	if got := s.Sh(t, "cat /says"); got != "old" {
		t.Errorf("in the sandbox: %q", got)
	}
	if got := d.Create(t, api.CreateSandbox{Image: name}).Sh(t, "cat /says"); got != "old" {
		t.Errorf("in one of the old image, by digest: %q", got)
	}
	if got := d.Create(t, api.CreateSandbox{Image: reference}).Sh(t, "cat /says"); got != "new" {
		t.Errorf("in one of the new image: %q", got)
	}
}

// A tag is a name and no copy; each name goes alone.
func TestTag(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	registry := harness.LyingRegistry(t, nil)
	reference := registry.Push(t, "team/app:1", twoLayers(t, "tagged"))
	d.MustPull(t, reference)
	before := stored(t, d)
	if got := d.CLI(t, "tag", reference, "mine/tool:2"); got.Code != 0 || !strings.HasPrefix(got.Stdout, "docker.io/mine/tool:2 sha256:") {
		t.Fatalf("tag: %+v", got)
	}
	if after := stored(t, d); strings.Join(before, " ") != strings.Join(after, " ") {
		t.Errorf("before %v, after %v", before, after)
	}
	if out, err := remove(t, d, reference, false); err != nil || out.Bytes != 0 {
		t.Errorf("removing one of two names: %+v, %v", out, err)
	}
	if got := d.Create(t, api.CreateSandbox{Image: "mine/tool:2"}).Sh(t, "cat /says"); got != "tagged" {
		t.Errorf("under its other name: %q", got)
	}
}

// The least recently used images go when there is more than the limit, and never one that a
// sandbox has.
func TestImageLimit(t *testing.T) {
	testenv.SameForAll(t)
	t.Parallel()
	testenv.RequireUserNS(t)
	size := len(harness.Tar(t, harness.Busybox(t)...))
	d := harness.Start(t, harness.Options{Args: []string{"--image-limit", fmt.Sprint(size * 5)}})
	registry := harness.LyingRegistry(t, nil)
	// They share no layer: each takes its files and its blob, some 1.5 times the size.
	image := func(n int) string {
		files := append([]harness.File{{Name: "n", Body: fmt.Sprint(n)}}, harness.Busybox(t)...)
		return registry.Push(t, fmt.Sprintf("big/image:%d", n), harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}}, harness.Layer(t, "gzip", harness.Tar(t, files...))))
	}
	var refs []string
	for n := range 3 {
		refs = append(refs, image(n))
		d.MustPull(t, refs[n])
	}
	s := d.Create(t, api.CreateSandbox{Image: refs[0]})      // held
	d.Create(t, api.CreateSandbox{Image: refs[1]}).Delete(t) // used later than 2
	refs = append(refs, image(3))
	d.MustPull(t, refs[3])
	got := imagesOf(t, d)
	var sum int64
	for _, i := range got {
		sum += i.UniqueSize
	}
	if _, ok := got[refs[2]]; ok || len(got) != 3 || sum > int64(size*5) {
		t.Errorf("with %d bytes of %d there are %v", sum, size*5, got)
	}
	if got := s.Sh(t, "cat /n"); got != "0" {
		t.Errorf("in the sandbox: %q", got)
	}
}

// kill -9 at any moment of a removal, and the next start finishes it: an image is there whole or
// not at all.
func TestKilledRemovalIsFinished(t *testing.T) {
	d := start(t)
	registry := harness.LyingRegistry(t, nil)
	reference := registry.Push(t, "team/app:1", twoLayers(t, "removed"))
	empty := stored(t, d)
	gone := 0
	for i := range testenv.Rounds(4, 8) {
		d.MustPull(t, reference)
		d.Mark(t)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = d.Call(ctx, http.MethodDelete, "/v1/images?reference="+url.QueryEscape(reference), nil, nil) // cut off on purpose
		}()
		// No event tells how far it is; the moments are spread over the time that it takes.
		select {
		case <-time.After(time.Duration(i) * 2 * time.Millisecond):
		case <-done:
		}
		kill9(t, d.PID()) // at once, where d.Kill9 looks around first
		d.WaitExit(t)
		cancel()
		<-done
		d.Launch(t)
		if _, there := imagesOf(t, d)[reference]; there {
			if v := verified(t, d); len(v.Problems) != 0 || v.Blobs != 4 {
				t.Fatalf("round %d: the image is listed and not whole: %+v", i, v)
			}
			if _, err := remove(t, d, reference, false); err != nil {
				t.Fatal(err)
			}
		} else {
			gone++
		}
		// Leftovers of the one before are removed in the background.
		eventually(t, func() error {
			if left := stored(t, d); strings.Join(left, " ") != strings.Join(empty, " ") {
				return fmt.Errorf("round %d: left\n%s", i, strings.Join(left, "\n"))
			}
			return nil
		})
	}
	t.Logf("%d of 8 removals had taken effect when the daemon was killed", gone)
}

// --verify finds a changed byte in a blob and in a tree, and a file that is missing.
func TestVerifyFindsDamage(t *testing.T) {
	d := start(t)
	registry := harness.LyingRegistry(t, nil)
	reference := registry.Push(t, "team/app:1", twoLayers(t, "intact"))
	d.MustPull(t, reference)
	v := verified(t, d)
	if v.Blobs != 4 || v.Layers != 2 || v.Entries < 40 || len(v.Problems) != 0 {
		t.Errorf("of an image that is intact: %+v", v)
	}
	var detail api.ImageDetail
	if err := d.Call(t.Context(), "GET", "/v1/images/inspect?reference="+url.QueryEscape(reference), nil, &detail); err != nil {
		t.Fatal(err)
	}
	blob := filepath.Join(d.DataDir, "blobs/blobs/sha256", strings.TrimPrefix(detail.Parts[1].Digest, "sha256:"))
	data, err := os.ReadFile(blob)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)-1] ^= 1
	if err := os.WriteFile(blob, data, 0o600); err != nil {
		t.Fatal(err)
	}
	if v := verified(t, d); len(v.Problems) == 0 || v.Problems[0].Digest != detail.Parts[1].Digest || v.Problems[0].Images[0] != reference {
		t.Errorf("of a blob with a changed byte: %+v", v.Problems)
	}
	if got := d.CLI(t, "images", "--verify"); got.Code != 1 || !strings.Contains(got.Stderr, detail.Parts[1].Digest) || !strings.Contains(got.Stderr, reference) {
		t.Errorf("images --verify: %+v", got)
	}
	if _, err := remove(t, d, reference, false); err != nil {
		t.Fatal(err)
	}
	d.MustPull(t, reference)
	if v := verified(t, d); len(v.Problems) != 0 {
		t.Errorf("pulled anew: %+v", v.Problems)
	}
	// The tree belongs to the sandboxes' ids; only root can damage it from outside.
	if os.Geteuid() != 0 {
		return
	}
	tree := filepath.Join(d.DataDir, "layers", strings.TrimPrefix(detail.Parts[0].ChainID, "sha256:"))
	if err := errors.Join(os.Remove(filepath.Join(tree, "bin/sed")), os.WriteFile(filepath.Join(tree, "etc/group"), []byte("root:x:0:\nuser:x:1000;\n"), 0)); err != nil {
		t.Fatal(err)
	}
	v = verified(t, d)
	if len(v.Problems) != 1 || !strings.Contains(v.Problems[0].Detail, "bin/sed: it is missing") || !strings.Contains(v.Problems[0].Detail, "etc/group: its bytes differ") {
		t.Errorf("of a damaged tree: %+v", v.Problems)
	}
}

func TestInspectAndHistory(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	registry := harness.LyingRegistry(t, nil)
	one, two := registry.Push(t, "team/app:1", twoLayers(t, "one")), registry.Push(t, "team/app:2", twoLayers(t, "two"))
	d.MustPull(t, one)
	d.MustPull(t, two)
	s := d.Create(t, api.CreateSandbox{Image: one})
	got := d.CLI(t, "image", "inspect", one)
	var detail api.ImageDetail
	if err := json.Unmarshal([]byte(got.Stdout), &detail); err != nil {
		t.Fatalf("%v: %+v", err, got)
	}
	if len(detail.UsedBy) != 1 || detail.UsedBy[0] != s.Name || detail.UsedAt.IsZero() || detail.Config.WorkingDir != "/home" || len(detail.Parts) != 2 {
		t.Errorf("inspect: %+v", detail)
	}
	if p := detail.Parts; len(p[0].SharedBy) != 1 || p[0].SharedBy[0] != two || p[1].SharedBy != nil || p[1].TreeSize != 3 {
		t.Errorf("layers: %+v", detail.Parts)
	}
	if got := d.CLI(t, "image", "history", one); got.Code != 0 || !strings.HasPrefix(got.Stdout, "CREATED") {
		t.Errorf("history: %+v", got)
	}
	if got := d.CLI(t, "image", "inspect", "never/was:1"); got.Code != 1 || !strings.Contains(got.Stderr, "never/was:1") {
		t.Errorf("inspect of nothing: %+v", got)
	}
}

// run calls a peer and returns its output.
func run(t *testing.T, program string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter) // it only ends what hangs
	defer cancel()
	cmd := exec.CommandContext(ctx, testenv.RequirePeer(t, program), args...)
	cmd.Env = append(os.Environ(), "TMPDIR="+t.TempDir(), "HOME="+t.TempDir(), "REGISTRY_AUTH_FILE=")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", program, args, err, out)
	}
	return string(out)
}

// skopeo and umoci read our exports, and we import theirs: the same image comes back, or one that
// runs the same where the format changes its bytes.
func TestArchivesGoToPeersAndBack(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	registry := harness.LyingRegistry(t, nil)
	// Debian 12's umoci does not know zstd.
	reference := registry.Push(t, "team/app:1", harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}},
		harness.Layer(t, "gzip", harness.Tar(t, harness.Busybox(t)...)), harness.Layer(t, "gzip", harness.Tar(t, harness.File{Name: "says", Body: "carried"}))))
	pulled := d.MustPull(t, reference)
	dir := t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	for _, args := range [][]string{{"-o", file("oci.tar")}, {"--format", "docker", "-o", file("docker.tar")}} {
		if got := d.CLI(t, slices.Concat([]string{"export"}, args, []string{reference})...); got.Code != 0 {
			t.Fatalf("export %v: %+v", args, got)
		}
	}
	again := d.CLI(t, "export", reference)
	if data, err := os.ReadFile(file("oci.tar")); err != nil || again.Stdout != string(data) {
		t.Errorf("two exports differ (%v)", err)
	}

	var seen struct {
		Digest string
		Env    []string
		Layers []string
	}
	for _, from := range []string{"oci-archive:" + file("oci.tar"), "docker-archive:" + file("docker.tar")} {
		if err := json.Unmarshal([]byte(run(t, "skopeo", "inspect", from)), &seen); err != nil || len(seen.Layers) != 2 || seen.Env[0] != "PATH=/bin" {
			t.Errorf("skopeo sees %+v of %s (%v)", seen, from, err)
		}
		if strings.HasPrefix(from, "oci") && seen.Digest != pulled.Digest {
			t.Errorf("skopeo sees the digest %s, want %s", seen.Digest, pulled.Digest)
		}
	}
	run(t, "skopeo", "copy", "--insecure-policy", "oci-archive:"+file("oci.tar"), "oci:"+file("layout")+":1.0")
	run(t, "skopeo", "copy", "--insecure-policy", "oci-archive:"+file("oci.tar"), "oci-archive:"+file("skopeo-oci.tar")+":back/oci:1")
	run(t, "skopeo", "copy", "--insecure-policy", "docker-archive:"+file("docker.tar"), "docker-archive:"+file("skopeo-docker.tar")+":back/docker:1")
	run(t, "gzip", "-k", file("skopeo-docker.tar"))
	// umoci unpacks and repacks it, with a file more.
	run(t, "umoci", "unpack", "--rootless", "--image", file("layout")+":1.0", file("bundle"))
	if err := os.WriteFile(file("bundle/rootfs/more"), []byte("by umoci"), 0o644); err != nil {
		t.Fatal(err)
	}
	run(t, "umoci", "repack", "--image", file("layout")+":2.0", file("bundle"))
	run(t, "skopeo", "copy", "--insecure-policy", "oci:"+file("layout")+":2.0", "oci-archive:"+file("umoci.tar"))

	if _, err := remove(t, d, reference, false); err != nil {
		t.Fatal(err)
	}
	if left := imagesOf(t, d); len(left) != 0 {
		t.Fatalf("images are left: %v", left)
	}
	for _, test := range []struct {
		name, want, says string
		args             []string
		same             bool // the very manifest
	}{
		{"our OCI archive", reference, "carried", []string{file("oci.tar")}, true},
		{"our docker archive", reference, "carried", []string{file("docker.tar")}, false},
		{"skopeo's OCI archive", "docker.io/back/oci:1", "carried", []string{file("skopeo-oci.tar")}, true},
		{"skopeo's docker archive", "docker.io/back/docker:1", "carried", []string{file("skopeo-docker.tar")}, false},
		{"the same, compressed", "docker.io/back/gz:1", "carried", []string{file("skopeo-docker.tar.gz"), "back/gz:1"}, false},
		{"umoci's", "docker.io/back/umoci:1", "carriedby umoci", []string{file("umoci.tar"), "back/umoci:1"}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := d.CLI(t, append([]string{"import", "--json"}, test.args...)...)
			var out api.ImagesImported
			if err := json.Unmarshal([]byte(got.Stdout), &out); err != nil || len(out.Images) != 1 || out.Images[0].Reference != test.want {
				t.Fatalf("%+v (%v)", got, err)
			}
			if test.same && out.Images[0].Digest != pulled.Digest {
				t.Errorf("its digest is %s, want %s", out.Images[0].Digest, pulled.Digest)
			}
			s := d.Create(t, api.CreateSandbox{Image: test.want})
			if got := s.Sh(t, "cat /says /more 2>/dev/null; true"); got != test.says {
				t.Errorf("in the sandbox: %q", got)
			}
			s.Delete(t)
		})
	}
	// A directory, with the tags of umoci, which are no names.
	if got := d.CLI(t, "import", file("layout")); got.Code != 1 || !strings.Contains(got.Stderr, "name") {
		t.Errorf("import of a layout without names: %+v", got)
	}
	run(t, "umoci", "rm", "--image", file("layout")+":2.0")
	if got := d.CLI(t, "import", file("layout"), "back/dir:1"); got.Code != 0 || !strings.Contains(got.Stdout, pulled.Digest) {
		t.Errorf("import of a directory: %+v", got)
	}
	prune(t, d, true)
	if left := imagesOf(t, d); len(left) != 0 {
		t.Errorf("prune --all left %v", left)
	}
}

// A root file system becomes an image that runs as the flags say, and the same one every time.
func TestImportOfARootFileSystem(t *testing.T) {
	d := start(t)
	root := harness.Tar(t, harness.Busybox(t)...)
	flags := []string{"import", "--rootfs", "--cmd", "echo", "--cmd", "hi", "-e", "PATH=/bin", "-e", "WHO=me", "-w", "/tmp", "-u", "1000", "-", "tools/base:1"}
	first := d.CLIInput(t, bytes.NewReader(root), flags...)
	again := d.CLIInput(t, bytes.NewReader(root), flags...)
	if first.Code != 0 || !strings.HasPrefix(first.Stdout, "docker.io/tools/base:1 sha256:") || first.Stdout != again.Stdout {
		t.Fatalf("import: %+v, then %+v", first, again)
	}
	// With its progress.
	var events []api.PullEvent
	images, err := d.Client(t).ImportImages(t.Context(), bytes.NewReader(root), client.ImportOptions{
		Reference: "tools/told:1", Rootfs: true, Progress: func(e api.PullEvent) { events = append(events, e) },
	})
	if err != nil || len(images) != 1 || images[0].Reference != "docker.io/tools/told:1" {
		t.Fatalf("import with progress: %+v, %v", images, err)
	}
	var steps []string
	for _, e := range events {
		if e.Layer == "" != (e.Images != nil) {
			t.Errorf("event %+v", e)
		}
		steps = append(steps, e.Status)
	}
	if diff := cmp.Diff([]string{"exists", "applying", "done", "done"}, steps); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	s := d.Create(t, api.CreateSandbox{Image: "tools/base:1"})
	if got := s.Sh(t, "echo $WHO; pwd; id -u"); got != "me\n/tmp\n1000\n" {
		t.Errorf("in the sandbox: %q", got)
	}
	if got := d.CLI(t, "import", "--cmd", "x", "/dev/null"); got.Code != 2 || !strings.Contains(got.Stderr, "--rootfs") {
		t.Errorf("flags of a root file system without it: %+v", got)
	}
	if got := d.CLIInput(t, bytes.NewReader(root), "import", "-"); got.Code != 1 || !strings.Contains(got.Stderr, "--rootfs") {
		t.Errorf("a root file system that is taken for an image: %+v", got)
	}
}

// Archives that lie or attack are refused with one error, and nothing of them stays.
func TestBadArchivesAreRefused(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	d.Warm(t)
	before := d.Snapshot(t)
	outside := filepath.Join(t.TempDir(), "target")
	if err := os.WriteFile(outside, []byte("untouched"), 0o666); err != nil {
		t.Fatal(err)
	}
	const layout = `{"imageLayoutVersion":"1.0.0"}`
	zeros := strings.Repeat("0", 64)
	index := func(digest string) string {
		return `{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:` + digest +
			`","size":2,"annotations":{"io.containerd.image.name":"evil/image:1"}}]}`
	}
	up := strings.Repeat("../", 20)
	good := harness.Tar(t, harness.File{Name: "x", Body: "y"})
	config := `{"architecture":"` + strings.TrimPrefix(harness.Platform(), "linux/") + `","os":"linux","config":{},"rootfs":{"type":"layers","diff_ids":["sha256:` + zeros + `"]}}`
	save := func(layer string) string {
		return `[{"Config":"c.json","RepoTags":["evil/image:1"],"Layers":["` + layer + `"]}]`
	}
	for _, test := range []struct {
		name string
		data []byte
		says string
		code api.Code
	}{
		{"empty", nil, "index.json", api.CodeImage},
		{"not an archive", []byte(strings.Repeat("<html>", 1000)), "OCI layout", api.CodeImage},
		{"a blob that is not its name", harness.Tar(t, harness.File{Name: "blobs/sha256/" + zeros, Body: "x"}), "digest", api.CodeImage},
		{"no such blob", harness.Tar(t, harness.File{Name: "oci-layout", Body: layout}, harness.File{Name: "index.json", Body: index(zeros)}), zeros, api.CodeImage},
		{"an index twice", harness.Tar(t, harness.File{Name: "index.json", Body: "{}"}, harness.File{Name: "./index.json", Body: "[]"}), "twice", api.CodeImage},
		{"a huge index", harness.Tar(t, harness.File{Name: "index.json", Body: strings.Repeat(" ", 5<<20)}), "index.json", api.CodeImage},
		{"cut short", harness.Tar(t, harness.File{Name: "oci-layout", Body: layout}, harness.File{Name: "big", Body: strings.Repeat("x", 9000)})[:3000], "", api.CodeImage},
		{"a name that climbs", harness.Tar(t, harness.File{Name: up + outside, Body: "planted"}), "..", api.CodeImage},
		{"a layer by a link to the host", harness.Tar(t, harness.File{Name: "l.tar", Type: tar.TypeSymlink, Link: outside},
			harness.File{Name: "c.json", Body: config}, harness.File{Name: "manifest.json", Body: save("l.tar")}), "l.tar", api.CodeImage},
		{"links in a circle", harness.Tar(t, harness.File{Name: "a", Type: tar.TypeSymlink, Link: "b"}, harness.File{Name: "b", Type: tar.TypeSymlink, Link: "a"},
			harness.File{Name: "c.json", Body: config}, harness.File{Name: "manifest.json", Body: save("a")}), "", api.CodeImage},
		{"a layer by a path of the host", harness.Tar(t, harness.File{Name: "c.json", Body: config}, harness.File{Name: "manifest.json", Body: save(up + outside)}), "", api.CodeImage},
		{"a layer that is not its diff id", harness.Tar(t, harness.File{Name: "l.tar", Body: string(good)}, harness.File{Name: "c.json", Body: config},
			harness.File{Name: "manifest.json", Body: save("l.tar")}), zeros, api.CodeImage},
		{"the name of the host image", harness.Tar(t, harness.File{Name: "l.tar", Body: string(good)}, harness.File{Name: "c.json", Body: config},
			harness.File{Name: "manifest.json", Body: strings.Replace(save("l.tar"), "evil/image:1", "host", 1)}), "host", api.CodeImage},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := d.Call(t.Context(), http.MethodPost, "/v1/images/import", bytes.NewReader(test.data), nil)
			wantProblem(t, err, test.code, test.says)
			if data, err := os.ReadFile(outside); err != nil || string(data) != "untouched" {
				t.Errorf("the file outside is now %q (%v)", data, err)
			}
		})
	}
	// A client that goes away in the middle leaves nothing either.
	ctx, cancel := context.WithCancel(t.Context())
	r := &endless{after: 3 << 20, stop: cancel, begin: harness.Tar(t, harness.File{Name: "oci-layout", Body: layout})[:1024]}
	if err := d.Call(ctx, http.MethodPost, "/v1/images/import?rootfs=true&reference=evil/image:2", r, nil); err == nil {
		t.Error("an import without an end came to one")
	}
	if list := imagesOf(t, d); len(list) != 0 {
		t.Errorf("images: %v", list)
	}
	d.NothingLeaked(t, before)
}

// endless is a body that goes on until its sender has had enough.
type endless struct {
	begin []byte
	after int
	stop  func()
}

func (e *endless) Read(p []byte) (int, error) {
	if len(e.begin) > 0 {
		n := copy(p, e.begin)
		e.begin = e.begin[n:]
		return n, nil
	}
	if e.after -= len(p); e.after < 0 {
		e.stop()
	}
	return len(p), nil
}

// Bad requests about images, each with one clear answer.
func TestBadImageRequestsAreAnsweredClearly(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	before := d.Snapshot(t)
	for _, test := range []struct {
		name         string
		method, path string
		body         any
		code         api.Code
		says         string
	}{
		{"remove nothing", "DELETE", "/v1/images", nil, api.CodeInvalid, "reference"},
		{"remove what is not here", "DELETE", "/v1/images?reference=never/was:1", nil, api.CodeNotFound, "never/was"},
		{"remove the host image", "DELETE", "/v1/images?reference=host", nil, api.CodeInvalid, "host"},
		{"remove a path", "DELETE", "/v1/images?reference=../../etc", nil, api.CodeInvalid, "etc"},
		{"force that is no truth value", "DELETE", "/v1/images?reference=a:1&force=maybe", nil, api.CodeInvalid, "maybe"},
		{"an unknown parameter", "DELETE", "/v1/images?reference=a:1&all=true", nil, api.CodeInvalid, "all"},
		{"prune with an unknown field", "POST", "/v1/images/prune", []byte(`{"everything":true}`), api.CodeInvalid, "everything"},
		{"tag without a target", "POST", "/v1/images/tag", api.TagImage{Source: "a:1"}, api.CodeInvalid, "target"},
		{"tag of what is not here", "POST", "/v1/images/tag", api.TagImage{Source: "never/was:1", Target: "b:1"}, api.CodeNotFound, "never/was"},
		{"tag as host", "POST", "/v1/images/tag", api.TagImage{Source: "never/was:1", Target: "host"}, api.CodeInvalid, "host"},
		{"tag with a digest", "POST", "/v1/images/tag", api.TagImage{Source: "never/was:1", Target: "a@sha256:" + strings.Repeat("0", 64)}, api.CodeInvalid, "digest"},
		{"inspect nothing", "GET", "/v1/images/inspect", nil, api.CodeInvalid, "reference"},
		{"inspect what is not here", "GET", "/v1/images/inspect?reference=never/was:1", nil, api.CodeNotFound, "never/was"},
		{"export what is not here", "GET", "/v1/images/export?reference=never/was:1", nil, api.CodeNotFound, "never/was"},
		{"export of the host image", "GET", "/v1/images/export?reference=host", nil, api.CodeInvalid, "host"},
		{"export in a format of fancy", "GET", "/v1/images/export?reference=never/was:1&format=zip", nil, api.CodeInvalid, "zip"},
		{"import under a bad name", "POST", "/v1/images/import?reference=UPPER/../case", []byte("x"), api.CodeInvalid, "UPPER"},
		{"import under a digest", "POST", "/v1/images/import?reference=a@sha256:" + strings.Repeat("0", 64), []byte("x"), api.CodeInvalid, "digest"},
		{"import with a progress that is neither", "POST", "/v1/images/import?progress=1", []byte("x"), api.CodeInvalid, "progress"},
		{"import with progress of what is no archive", "POST", "/v1/images/import?progress=true", []byte(strings.Repeat("x", 2000)), api.CodeImage, ""},
		{"import as host", "POST", "/v1/images/import?reference=host", []byte("x"), api.CodeInvalid, "host"},
		{"import of a root without a name", "POST", "/v1/images/import?rootfs=true", []byte("x"), api.CodeInvalid, "name"},
		{"import for another system", "POST", "/v1/images/import?platform=windows/amd64", []byte("x"), api.CodeInvalid, "windows"},
		{"import with a configuration that nobody reads", "POST", "/v1/images/import?config=" + url.QueryEscape(`{"user":"1"}`), []byte("x"), api.CodeInvalid, "config"},
		{"import with an unknown configuration", "POST", "/v1/images/import?rootfs=true&reference=a:1&config=" + url.QueryEscape(`{"onbuild":[]}`), []byte("x"), api.CodeInvalid, "onbuild"},
		{"import with a bad environment", "POST", "/v1/images/import?rootfs=true&reference=a:1&config=" + url.QueryEscape(`{"env":["X"]}`), []byte("x"), api.CodeInvalid, "env"},
		{"import of a root that is no archive", "POST", "/v1/images/import?rootfs=true&reference=a:1", []byte(strings.Repeat("x", 2000)), api.CodeImage, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			wantProblem(t, d.Call(t.Context(), test.method, test.path, test.body, nil), test.code, test.says)
		})
	}
	d.NothingLeaked(t, before)
}

// Debian's registry with a certificate of its own CA and a password: refused without either,
// served with both.
func TestRegistryWithCAAndPassword(t *testing.T) {
	testenv.SameForAll(t)
	t.Parallel()
	testenv.RequireUserNS(t)
	registry := harness.GuardedRegistry(t)
	reference := registry.Push(t, "private/app:1", twoLayers(t, "guarded"))
	login := func(t *testing.T, password string) string {
		t.Helper()
		file := filepath.Join(t.TempDir(), "auth.json")
		if err := os.WriteFile(file, []byte(registry.AuthFile(harness.RegistryUser, password)), 0o644); err != nil {
			t.Fatal(err)
		}
		return "REGISTRY_AUTH_FILE=" + file
	}
	ca := []string{"--registry-ca", registry.CA}
	for _, test := range []struct {
		name string
		args []string
		env  []string
		says string // empty: it works
	}{
		{"unknown CA", nil, []string{login(t, harness.RegistryPassword)}, "--registry-ca"},
		{"no password", ca, nil, "login"},
		{"wrong password", ca, []string{login(t, "guessed")}, "login"},
		{"both", ca, []string{login(t, harness.RegistryPassword)}, ""},
		{"any certificate", []string{"--insecure-registry", registry.Host}, []string{login(t, harness.RegistryPassword)}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := harness.Start(t, harness.Options{Args: test.args, Env: test.env})
			_, err := d.Pull(t.Context(), reference, false)
			if test.says != "" {
				wantProblem(t, err, api.CodeRegistry, test.says, registry.Host)
			} else if err != nil {
				t.Error(err)
			}
			if strings.Contains(d.Log(), "s3cret") || err != nil && strings.Contains(err.Error(), "s3cret") {
				t.Error("the password is told")
			}
		})
	}
}

// An image pushed to a real registry, with TLS and a password, is the imported one: skopeo finds
// the same digests.
func TestPush(t *testing.T) {
	testenv.SameForAll(t)
	t.Parallel()
	testenv.RequireUserNS(t)
	skopeo := testenv.RequirePeer(t, "skopeo")
	registry, source := harness.GuardedRegistry(t), harness.LyingRegistry(t, nil)
	auth := filepath.Join(t.TempDir(), "auth.json")
	if err := os.WriteFile(auth, []byte(registry.AuthFile(harness.RegistryUser, harness.RegistryPassword)), 0o644); err != nil {
		t.Fatal(err)
	}
	d := harness.Start(t, harness.Options{Args: []string{"--registry-ca", registry.CA}, Env: []string{"REGISTRY_AUTH_FILE=" + auth}})
	pulled := d.MustPull(t, source.Push(t, "team/app:1", twoLayers(t, "pushed")))
	target := registry.Name("back/app:1")
	if got := d.CLI(t, "tag", pulled.Reference, target); got.Code != 0 {
		t.Fatalf("tag: %+v", got)
	}
	got := d.CLI(t, "push", "--platform", pulled.Platform, target)
	if want := target + " " + pulled.Digest + "\n"; got.Code != 0 || got.Stdout != want {
		t.Fatalf("push: %+v, want %q", got, want)
	}
	certs := t.TempDir()
	data, err := os.ReadFile(registry.CA)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(certs, "ca.crt"), data, 0o644); err != nil {
		t.Fatal(err)
	}
	layout := filepath.Join(t.TempDir(), "layout")
	run(t, skopeo, "copy", "--insecure-policy", "--src-cert-dir", certs, "--src-creds", harness.RegistryUser+":"+harness.RegistryPassword,
		"--preserve-digests", "docker://"+target, "oci:"+layout+":1")
	var index struct{ Manifests []struct{ Digest string } }
	if data, err = os.ReadFile(filepath.Join(layout, "index.json")); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &index); err != nil || len(index.Manifests) != 1 || index.Manifests[0].Digest != pulled.Digest {
		t.Errorf("skopeo has %s, want %s (%v)", data, pulled.Digest, err)
	}

	// Without the password it says so, and what to do; the password is told nowhere.
	if err := os.WriteFile(auth, []byte(registry.AuthFile(harness.RegistryUser, "guessed")), 0o644); err != nil {
		t.Fatal(err)
	}
	got = d.CLI(t, "push", target)
	if got.Code != 1 || !strings.Contains(got.Stderr, "login") || !strings.Contains(got.Stderr, registry.Host) {
		t.Errorf("with a wrong password: %+v", got)
	}
	if said := got.Stderr + d.Log(); strings.Contains(said, "s3cret") || strings.Contains(said, "guessed") {
		t.Error("a password is told")
	}
	wantProblem(t, d.Call(t.Context(), http.MethodPost, "/v1/images/push", api.PushImage{Reference: target, Platform: "linux/s390x"}, nil),
		api.CodeInvalid, "is stored for "+pulled.Platform+" only, not for linux/s390x")
	wantProblem(t, d.Call(t.Context(), http.MethodPost, "/v1/images/push", api.PushImage{Reference: target, Platform: "linux\x07"}, nil), api.CodeInvalid, "platform")
	wantProblem(t, d.Call(t.Context(), http.MethodPost, "/v1/images/push", api.PushImage{Reference: "host"}, nil), api.CodeInvalid, "not pushed")
	wantProblem(t, d.Call(t.Context(), http.MethodPost, "/v1/images/push", api.PushImage{Reference: "not/here:1"}, nil), api.CodeNotFound, "not stored")
}

// A mirror is asked first, and the registry itself where the mirror has nothing.
func TestMirror(t *testing.T) {
	testenv.SameForAll(t)
	t.Parallel()
	testenv.RequireUserNS(t)
	var asked atomic.Int64
	count := func(honest http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { asked.Add(1); honest.ServeHTTP(w, r) })
	}
	origin, mirror := harness.LyingRegistry(t, count), harness.LyingRegistry(t, nil)
	d := harness.Start(t, harness.Options{Args: []string{"--registry-mirror", origin.Host + "=" + mirror.Host}})
	only := origin.Push(t, "team/only-there:1", twoLayers(t, "origin"))
	mirror.Push(t, "team/app:1", twoLayers(t, "mirrored"))
	asked.Store(0)
	reference := origin.Name("team/app:1")
	if image := d.MustPull(t, reference); image.Reference != reference || asked.Load() != 0 {
		t.Errorf("%s was pulled with %d requests to the registry itself", image.Reference, asked.Load())
	}
	d.MustPull(t, only)
	if asked.Load() == 0 {
		t.Error("what the mirror lacks came without asking the registry")
	}
}

// A registry that breaks off in the middle of a layer is asked for the rest only; one that wants
// patience gets it.
func TestStubbornRegistry(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	var cut, ranges, busy atomic.Int64
	lie := func(honest http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.Contains(r.URL.Path, "/manifests/") && busy.Add(1) == 1 {
				w.Header().Set("Retry-After", "1")
				w.WriteHeader(http.StatusTooManyRequests)
				return
			}
			if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, "/blobs/sha256:") {
				honest.ServeHTTP(w, r)
				return
			}
			rec := &recorder{header: http.Header{}}
			plain := r.Clone(r.Context())
			plain.Header.Del("Range")
			honest.ServeHTTP(rec, plain)
			body := rec.body.Bytes()
			var from int
			if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-", &from); err == nil {
				ranges.Add(1)
				w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(body)-1, len(body)))
				w.Header().Set("Content-Length", fmt.Sprint(len(body)-from))
				w.WriteHeader(http.StatusPartialContent)
			} else {
				w.Header().Set("Content-Length", fmt.Sprint(len(body)))
			}
			rest := body[from:]
			if len(rest) > 300_000 { // the layer with busybox, a third at a time
				cut.Add(1)
				_, _ = w.Write(rest[:300_000])
				_ = http.NewResponseController(w).Flush()
				panic(http.ErrAbortHandler)
			}
			_, _ = w.Write(rest) // the client may have gone
		})
	}
	lies := &switched{}
	registry := harness.LyingRegistry(t, lies.wrap(lie))
	reference := registry.Push(t, "team/app:1", twoLayers(t, "stubborn"))
	lies.on.Store(true)
	d.MustPull(t, reference)
	if cut.Load() == 0 || ranges.Load() < cut.Load() || busy.Load() < 2 {
		t.Errorf("the blob was cut %d times, ranges were asked for %d times, the manifest %d times", cut.Load(), ranges.Load(), busy.Load())
	}
	if v := verified(t, d); len(v.Problems) != 0 {
		t.Errorf("verify: %+v", v.Problems)
	}
}

// An image that a peer exports to a registry is the very image: skopeo pushes our archive, and its
// digest is the same.
func TestExportIsThePulledImage(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	registry := harness.DebianRegistry(t, false)
	reference := registry.Push(t, "team/app:1", twoLayers(t, "round"))
	pulled := d.MustPull(t, reference)
	file := filepath.Join(t.TempDir(), "image.tar")
	if got := d.CLI(t, "export", "-o", file, reference); got.Code != 0 {
		t.Fatalf("export: %+v", got)
	}
	if fi, err := os.Stat(file); err != nil || fi.Mode().Perm()&fs.ModePerm != 0o600 {
		t.Errorf("the archive's mode is %v (%v)", fi.Mode(), err)
	}
	run(t, "skopeo", "copy", "--insecure-policy", "--dest-tls-verify=false", "oci-archive:"+file, "docker://"+registry.Name("back/app:1"))
	ref, err := name.ParseReference(registry.Name("back/app:1"), name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	head, err := remote.Head(ref)
	if err != nil || head.Digest.String() != pulled.Digest {
		t.Errorf("the registry has %v, want %s (%v)", head, pulled.Digest, err)
	}
}
