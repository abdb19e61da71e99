package functional

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

func diffOf(t *testing.T, d *harness.Daemon, id string) []string {
	t.Helper()
	var diff api.SandboxDiff
	if err := d.Call(t.Context(), http.MethodGet, "/v1/sandboxes/"+id+"/diff", nil, &diff); err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, c := range diff.Changes {
		// Places that the image had not, and that every sandbox gets.
		if !slices.Contains([]string{"/dev", "/proc", "/sys"}, c.Path) {
			lines = append(lines, fmt.Sprintf("%s %s %s %d", c.Kind, c.Type, c.Path, c.Size))
		}
	}
	return lines
}

// tree lists all that a layer carries of some directories of a sandbox, for the sandbox itself to
// say.
const tree = `find /data /opt /says -xdev 2>/dev/null | sort | xargs stat -c '%n %A %u:%g %s %Y %h' ; find /data -type f | sort | xargs md5sum; readlink /data/link`

// A sandbox's changes are listed and become an image. A sandbox of that image has the very tree,
// with every owner, and deleted files stay deleted. The new image goes to peers as any other.
func TestCommit(t *testing.T) {
	d := start(t)
	registry := harness.LyingRegistry(t, nil)
	base := registry.Push(t, "team/base:1", twoLayers(t, "base"))
	d.MustPull(t, base)
	s := d.Create(t, api.CreateSandbox{Image: base})
	if got := diffOf(t, d, s.ID); len(got) != 0 {
		t.Errorf("before anything was done: %q", got)
	}
	s.Sh(t, `umask 022; mkdir -p /data/sub /opt && echo hello > /data/sub/f && ln /data/sub/f /data/hard && ln -s /says /data/link && rm /says
		dd if=/dev/zero of=/data/large bs=1M count=3 2>/dev/null; truncate -s 30M /data/sparse; mkfifo /data/fifo
		chmod 4750 /data/hard; chmod 0 /data/large; touch /data/.wh.bin; echo new > /opt/new`)
	want := []string{
		"deleted file /says 4", "added directory /data 0", "added fifo /data/fifo 0", "added file /data/hard 6", "added file /data/large 3145728",
		"added symlink /data/link 0", "added file /data/sparse 31457280", "added directory /data/sub 0", "added file /data/sub/f 6",
		"added directory /opt 0", "added file /opt/new 4",
	}
	if diff := cmp.Diff(want, diffOf(t, d, s.Name)); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
	if got := d.CLI(t, "diff", s.Name); got.Code != 0 || !strings.Contains(got.Stdout, "D /says") || !strings.Contains(got.Stdout, "A /data/large  3.146MB") ||
		!strings.Contains(got.Stderr, "whiteout") {
		t.Errorf("diff: %+v", got)
	}
	s.Sh(t, "rm /data/.wh.bin")
	before := s.Sh(t, tree)
	if !strings.Contains(before, "/data/sparse ") || !strings.Contains(before, "  /data/sub/f\n") {
		t.Fatalf("the sandbox lists its tree as\n%s", before)
	}

	got := d.CLI(t, "commit", "--entrypoint", "cat", "-e", "MORE=yes", "-w", "/data", "-l", "stage=two", "-m", "by a test", s.Name, "team/made:1")
	if got.Code != 0 || !strings.HasPrefix(got.Stdout, "docker.io/team/made:1 sha256:") || got.Stderr != "" {
		t.Fatalf("commit: %+v", got)
	}
	made := d.Create(t, api.CreateSandbox{Image: "team/made:1"})
	if diff := cmp.Diff(before, made.Sh(t, tree)); diff != "" {
		t.Errorf("the committed tree differs (-sandbox +image):\n%s", diff)
	}
	if got := made.Sh(t, "echo $MORE; pwd; test ! -e /says && echo gone"); got != "yes\n/data\ngone\n" {
		t.Errorf("in a sandbox of it: %q", got)
	}
	var detail api.ImageDetail
	if err := d.Call(t.Context(), http.MethodGet, "/v1/images/inspect?reference=team/made:1", nil, &detail); err != nil {
		t.Fatal(err)
	}
	last := detail.History[len(detail.History)-1]
	if !slices.Equal(detail.Config.Entrypoint, []string{"cat"}) || detail.Config.Cmd != nil || detail.Config.Labels["stage"] != "two" || detail.Layers != 3 ||
		!slices.Contains(detail.Config.Env, "PATH=/bin") || last.Comment != "by a test" || last.EmptyLayer {
		t.Errorf("inspect: %+v", detail)
	}
	if v := verified(t, d); len(v.Problems) != 0 {
		t.Errorf("verify: %+v", v.Problems)
	}
	// A peer takes it.
	archive := filepath.Join(t.TempDir(), "made.tar")
	if got := d.CLI(t, "export", "-o", archive, "team/made:1"); got.Code != 0 {
		t.Fatalf("export: %+v", got)
	}
	layout := filepath.Join(t.TempDir(), "layout")
	run(t, "skopeo", "copy", "--insecure-policy", "oci-archive:"+archive, "oci:"+layout+":1")

	// The one that was committed goes on, and may be committed when it has ended.
	if got := s.Sh(t, "echo still here"); got != "still here\n" {
		t.Errorf("after the commit: %q", got)
	}
	if got := d.CLI(t, "commit", s.Name, "team/made:2"); got.Code != 0 {
		t.Errorf("commit once more: %+v", got)
	}
}

// A sandbox shows its image's "/" with the owner and mode that it has there, which is no change.
func TestTheRootIsAsInItsImage(t *testing.T) {
	d := shared(t)
	registry := harness.LyingRegistry(t, nil)
	base := registry.Push(t, "team/root:1", harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}, Cmd: []string{"sh"}},
		harness.Layer(t, "gzip", harness.Tar(t, append(harness.Busybox(t), harness.File{Name: "./", Type: tar.TypeDir, Mode: 0o1751})...)),
		harness.Layer(t, "gzip", harness.Tar(t, harness.File{Name: "second"}))))
	d.MustPull(t, base)
	s := d.Create(t, api.CreateSandbox{Image: base})
	if got := s.Sh(t, "stat -c %a:%u:%g /"); got != "1751:0:0\n" {
		t.Errorf("/ has %q", got)
	}
	if got := diffOf(t, d, s.ID); len(got) != 0 {
		t.Errorf("before anything was done: %q", got)
	}
	s.Sh(t, "chmod 755 /")
	if got := diffOf(t, d, s.ID); !slices.Equal(got, []string{"changed directory / 0"}) {
		t.Errorf("after a change: %q", got)
	}
}

func TestCommitOfWhatCannotBe(t *testing.T) {
	d := start(t)
	registry := harness.LyingRegistry(t, nil)
	base := registry.Push(t, "team/base:1", twoLayers(t, "base"))
	d.MustPull(t, base)
	host, s := d.Create(t, api.CreateSandbox{}), d.Create(t, api.CreateSandbox{Image: base})
	images := len(imagesOf(t, d))
	host.Sh(t, "echo x > /tmp/mine")
	if got := diffOf(t, d, host.ID); !slices.Contains(got, "added file /tmp/mine 2") {
		t.Errorf("diff of the host image: %q", got)
	}
	commit := func(id string, req api.CommitSandbox) error {
		return d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/"+id+"/commit", req, nil)
	}
	wantProblem(t, commit(host.ID, api.CommitSandbox{Reference: "a/b:1"}), api.CodeConflict, "/usr")
	wantProblem(t, commit("nobody", api.CommitSandbox{Reference: "a/b:1"}), api.CodeNotFound, "nobody")
	wantProblem(t, commit(s.ID, api.CommitSandbox{}), api.CodeInvalid, "reference")
	wantProblem(t, commit(s.ID, api.CommitSandbox{Reference: "host"}), api.CodeInvalid, "host")
	wantProblem(t, commit(s.ID, api.CommitSandbox{Reference: "a/b@sha256:" + strings.Repeat("0", 64)}), api.CodeInvalid, "digest")
	wantProblem(t, commit(s.ID, api.CommitSandbox{Reference: "a/b:1", Config: api.ImageConfig{WorkingDir: "../etc"}}), api.CodeInvalid, "working_dir")
	for text, req := range map[string]api.CommitSandbox{
		"config.volumes":     {Config: api.ImageConfig{Volumes: []string{"data"}}},
		"config.ports":       {Config: api.ImageConfig{Ports: []string{"80"}}},
		"and 1000 are":       {Config: api.ImageConfig{Ports: slices.Repeat([]string{"80/tcp"}, 1001)}},
		"config.stop_signal": {Config: api.ImageConfig{StopSignal: "SIGNOPE"}},
		"health_check.test":  {Config: api.ImageConfig{HealthCheck: &api.HealthCheck{Test: []string{"nosuch"}}}},
		"author":             {Author: "a\nb"},
	} {
		req.Reference = "a/b:1"
		wantProblem(t, commit(s.ID, req), api.CodeInvalid, text)
	}
	wantProblem(t, d.Call(t.Context(), http.MethodGet, "/v1/sandboxes/nobody/diff", nil, nil), api.CodeNotFound, "nobody")
	// What no layer can have is said, and nothing is left.
	s.Sh(t, `d=/deep; for i in $(seq 140); do d=$d/d; done; mkdir -p $d`)
	wantProblem(t, commit(s.ID, api.CommitSandbox{Reference: "a/b:1"}), api.CodeConflict, "128")
	if after := len(imagesOf(t, d)); after != images {
		t.Errorf("%d images, before %d", after, images)
	}
}

// Traps that a sandbox plants for a reader of its directory are not followed, be they there before
// or put there meanwhile: nothing of the host is in the layer.
func TestCommitFollowsNothing(t *testing.T) {
	d := shared(t)
	registry := harness.LyingRegistry(t, nil)
	base := registry.Push(t, "team/base:1", twoLayers(t, "base"))
	d.MustPull(t, base)
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("planted on the host"), 0o644); err != nil {
		t.Fatal(err)
	}
	s := d.Create(t, api.CreateSandbox{Image: base})
	s.Sh(t, "ln -s "+secret+" /file; ln -s / /whole; ln -s "+filepath.Dir(secret)+" /dir; mkdir /race; mkfifo /fifo")
	ctx, stop := context.WithCancel(t.Context())
	swapped := make(chan error, 1)
	go func() {
		_, err := s.TryExec(ctx, api.ExecRequest{Argv: []string{"sh", "-c", `while :; do
			mkdir /race/d; echo mine > /race/d/secret; rm -r /race/d; ln -s ` + filepath.Dir(secret) + ` /race/d; rm /race/d; mkfifo /race/d; rm /race/d; done`}})
		swapped <- err
	}()
	archive := filepath.Join(t.TempDir(), "made.tar")
	commits := 0
	for i := range 10 {
		var made api.SandboxCommitted
		err := d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/"+s.ID+"/commit", api.CommitSandbox{Reference: "team/followed:1"}, &made)
		var p *api.Problem
		if errors.As(err, &p) && p.Code == api.CodeConflict {
			continue // it changed meanwhile, and could not be frozen
		}
		if err != nil {
			t.Fatalf("commit %d: %v", i, err)
		}
		commits++
		if got := d.CLI(t, "export", "--format", "docker", "-o", archive, "team/followed:1"); got.Code != 0 {
			t.Fatalf("export: %+v", got)
		}
		data, err := os.ReadFile(archive)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(data, []byte("planted on the host")) {
			t.Fatal("THE HOST'S FILE IS IN THE IMAGE")
		}
	}
	stop()
	if commits == 0 {
		t.Error("no commit was made")
	}
	if err := <-swapped; err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("what swaps ended by itself: %v", err)
	}
	c := clientOf(t, d)
	eventually(t, func() error { // it is killed when the daemon sees that no client waits for it
		list, err := c.Processes(t.Context(), s.ID)
		if err == nil && len(list) > 0 {
			err = fmt.Errorf("%+v", list)
		}
		return err
	})
	if got := diffOf(t, d, s.ID); !slices.Contains(got, "added symlink /file 0") || !slices.Contains(got, "added symlink /whole 0") {
		t.Errorf("changes: %q", got)
	}
}

// A FIFO in the place of the file that names the time zone blocks no commit: the layer is made
// where it would be opened.
func TestCommitWaitsForNoZone(t *testing.T) {
	d := shared(t)
	registry := harness.LyingRegistry(t, nil)
	base := registry.Push(t, "team/base:1", twoLayers(t, "base"))
	d.MustPull(t, base)
	s := d.Create(t, api.CreateSandbox{Image: base})
	s.Sh(t, "mkdir -p /etc; touch -d @-1 /x; rm -rf /etc/localtime; mkfifo /etc/localtime")
	ctx, cancel := context.WithTimeout(t.Context(), testenv.HungAfter)
	defer cancel()
	if err := d.Call(ctx, http.MethodPost, "/v1/sandboxes/"+s.ID+"/commit", api.CommitSandbox{Reference: "a/b:1"}, nil); err != nil {
		t.Fatal(err)
	}
	if got := s.Sh(t, "echo thawed"); got != "thawed\n" {
		t.Errorf("after the commit: %q", got)
	}
}
