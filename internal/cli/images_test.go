package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// imageRoutes answer for images: what is called "used…" a sandbox has, what is called "damaged" is.
func (f *fakeDaemon) imageRoutes(mux *http.ServeMux) {
	mux.HandleFunc("DELETE /v1/images", func(w http.ResponseWriter, r *http.Request) {
		ref := r.URL.Query().Get("reference")
		if strings.HasPrefix(ref, "used") && r.URL.Query().Get("force") != "true" {
			refuse(w, api.CodeConflict, "sandboxd ps", "image %s is held by work", ref)
			return
		}
		answerJSON(w, 200, api.ImagesRemoved{Removed: []string{ref}, Bytes: 10})
	})
	mux.HandleFunc("POST /v1/images/prune", func(w http.ResponseWriter, r *http.Request) {
		var req api.PruneImages
		_ = json.NewDecoder(r.Body).Decode(&req)
		out := api.ImagesRemoved{Removed: []string{"old:1"}, Bytes: 1500000}
		if req.All {
			out.Removed = append(out.Removed, "unused:1")
		}
		answerJSON(w, 200, out)
	})
	mux.HandleFunc("POST /v1/sandboxes/prune", func(w http.ResponseWriter, r *http.Request) {
		var req api.PruneSandboxes
		_ = json.NewDecoder(r.Body).Decode(&req)
		answerJSON(w, 200, api.SandboxesRemoved{Removed: []api.SandboxRef{{ID: "x", Name: fmt.Sprint(*req.OlderThan, req.Labels)}}, Recent: 2})
	})
	mux.HandleFunc("POST /v1/snapshots/prune", func(w http.ResponseWriter, r *http.Request) {
		var req api.PruneSnapshots
		_ = json.NewDecoder(r.Body).Decode(&req)
		answerJSON(w, 200, api.SnapshotsRemoved{Removed: []string{fmt.Sprint(req.OlderThan != nil, req.Labels)}, Bytes: 1500000})
	})
	mux.HandleFunc("POST /v1/images/tag", func(w http.ResponseWriter, r *http.Request) {
		var req api.TagImage
		_ = json.NewDecoder(r.Body).Decode(&req)
		answerJSON(w, 200, api.Image{Reference: req.Target, Digest: "sha256:0123"})
	})
	mux.HandleFunc("GET /v1/images/inspect", func(w http.ResponseWriter, r *http.Request) {
		answerJSON(w, 200, api.ImageDetail{
			Image:   api.Image{Reference: r.URL.Query().Get("reference")},
			History: []api.ImageHistory{{CreatedBy: "first\x1b[31m\n step", Size: 2000000}, {Created: time.Now(), CreatedBy: "second step", EmptyLayer: true}},
		})
	})
	mux.HandleFunc("GET /v1/images/verify", func(w http.ResponseWriter, _ *http.Request) {
		out := api.ImagesVerified{Blobs: 3, Bytes: 1000, Layers: 1, Entries: 7, Problems: []api.ImageProblem{}}
		for _, name := range f.images {
			if name == "damaged" {
				out.Problems = append(out.Problems, api.ImageProblem{Images: []string{name}, Digest: "sha256:0123", Detail: "its digest is another"})
			}
		}
		answerJSON(w, 200, out)
	})
	mux.HandleFunc("POST /v1/images/import", func(w http.ResponseWriter, r *http.Request) {
		data, _ := io.ReadAll(r.Body)
		q := r.URL.Query()
		f.log = append(f.log, "import "+q.Get("config")+" "+string(data[:min(len(data), 5)]))
		if q.Get("progress") != "true" {
			f.log = append(f.log, "without progress")
		}
		w.Header().Set("Content-Type", api.TypeNDJSON)
		for _, e := range []api.PullEvent{{Layer: "sha256:4567", Status: "applying"}, {Status: "done", Images: []api.Image{{Reference: q.Get("reference"), Digest: "sha256:0123"}}}} {
			_ = json.NewEncoder(w).Encode(e)
		}
	})
	mux.HandleFunc("POST /v1/builds", f.build)
	mux.HandleFunc("GET /v1/images/export", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", api.TypeTar)
		if r.URL.Query().Get("reference") == "damaged" {
			w.Header().Set("Content-Length", "100")
		}
		_, _ = io.WriteString(w, "archive in "+r.URL.Query().Get("format"))
	})
}

func TestImageCommands(t *testing.T) {
	dir := t.TempDir()
	archive := filepath.Join(dir, "in.tar")
	if err := os.WriteFile(archive, []byte("bytes"), 0o600); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "out.tar")
	for _, test := range []struct {
		name   string
		args   []string
		images []string
		code   int
		stdout string // is in it
		stderr string // is in it
	}{
		{name: "rmi", args: []string{"rmi", "a:1", "b:1"}, stdout: "a:1\nb:1\n"},
		{name: "rmi of one in use", args: []string{"rmi", "used:1"}, code: 1, stderr: "held by work"},
		{name: "rmi goes on after one in use", args: []string{"rmi", "used:1", "b:1"}, code: 1, stdout: "b:1\n", stderr: "held by work"},
		{name: "rmi --force", args: []string{"rmi", "--force", "used:1"}, stdout: "used:1\n"},
		{name: "rmi --json", args: []string{"rmi", "--json", "a:1", "b:1"}, stdout: `"bytes": 20`},
		{name: "rmi of nothing", args: []string{"rmi"}, code: 2, stderr: "at least 1"},
		{name: "prune", args: []string{"images", "prune"}, stdout: "old:1\n1 images, 0 steps of builds, 1.5MB\n"},
		{name: "prune ended", args: []string{"prune"}, stdout: "3600 map[]\n", stderr: "2 more have ended since then and stay"},
		{name: "prune all ended of a label", args: []string{"prune", "--older-than", "0s", "-l", "a=b"}, stdout: "0 map[a:b]\n"},
		{name: "prune with a negative age", args: []string{"prune", "--older-than", "-1s"}, code: 2, stderr: "is negative"},
		{name: "prune snapshots", args: []string{"snapshots", "prune", "--older-than", "0s"}, stdout: "true map[]\n1 snapshots, 1.5MB\n"},
		{name: "prune snapshots of a label", args: []string{"snapshots", "prune", "-l", "a=b"}, stdout: "false map[a:b]\n"},
		{name: "prune snapshots without saying which", args: []string{"snapshots", "prune"}, code: 2, stderr: "which snapshots?"},
		{name: "prune --all", args: []string{"images", "prune", "--all"}, stdout: "unused:1\n2 images"},
		{name: "tag", args: []string{"tag", "a:1", "b:1"}, stdout: "b:1 sha256:0123\n"},
		{name: "inspect", args: []string{"image", "inspect", "a:1"}, stdout: `"reference": "a:1"`},
		{name: "history, last step first and nothing for the terminal", args: []string{"image", "history", "a:1"}, stdout: "first\\x1b[31m step\n"},
		{name: "verify", args: []string{"images", "--verify"}, stdout: "3 blobs (1kB) read, 1 trees compared, 7 entries"},
		{name: "verify finds damage", args: []string{"images", "--verify"}, images: []string{"damaged"}, code: 1, stderr: "sha256:0123"},
		{name: "import", args: []string{"import", archive, "a:1"}, stdout: "a:1 sha256:0123\n"},
		{name: "import of what is not there", args: []string{"import", dir + "/none"}, code: 1, stderr: "none"},
		{name: "import of a directory that is no layout", args: []string{"import", dir, "a:1"}, code: 1, stderr: "not an OCI layout"},
		{name: "import of a root that is a directory", args: []string{"import", "--rootfs", dir, "a:1"}, code: 2, stderr: "tar -C"},
		{name: "import of a root without a name", args: []string{"import", "--rootfs", archive}, code: 2, stderr: "REFERENCE"},
		{name: "flags of a root without one", args: []string{"import", "-u", "1", archive}, code: 2, stderr: "--rootfs"},
		{name: "export to stdout", args: []string{"export", "--format", "docker", "a:1"}, stdout: "archive in docker"},
		{name: "export to a file", args: []string{"export", "-o", out, "a:1"}},
		{name: "export in an unknown format", args: []string{"export", "--format", "zip", "a:1"}, code: 2, stderr: "zip"},
		{name: "export that breaks off", args: []string{"export", "-o", filepath.Join(dir, "half.tar"), "damaged"}, code: 1, stderr: "--verify"},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newFake()
			f.images = test.images
			got := finish(t, command(t, f.start(t), test.args...))
			if got.code != test.code || !strings.Contains(got.stdout, test.stdout) || !strings.Contains(got.stderr, test.stderr) {
				t.Errorf("%q ended with %d\nstdout %q\nstderr %q", test.args, got.code, got.stdout, got.stderr)
			}
		})
	}
	if data, err := os.ReadFile(out); err != nil || string(data) != "archive in oci" {
		t.Errorf("the exported file has %q (%v)", data, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Errorf("left beside the archives: %v (%v)", entries, err)
	}
}

// What runs a root file system is sent with it, word by word.
func TestImportSendsTheConfiguration(t *testing.T) {
	f := newFake()
	archive := filepath.Join(t.TempDir(), "root.tar")
	if err := os.WriteFile(archive, []byte("bytes"), 0o600); err != nil {
		t.Fatal(err)
	}
	got := finish(t, command(t, f.start(t), "import", "--rootfs", "--entrypoint", "sh", "--entrypoint", "-c", "--cmd", "a, b", "-e", "A=b,c", "-w", "/w", "-u", "1:2", archive, "a:1"))
	const want = `import {"entrypoint":["sh","-c"],"cmd":["a, b"],"env":["A=b,c"],"working_dir":"/w","user":"1:2"} bytes`
	f.mu.Lock()
	defer f.mu.Unlock()
	if log := strings.Join(f.log, "\n"); got.code != 0 || !strings.Contains(log, want) {
		t.Errorf("exit %d, %s; the daemon got\n%s", got.code, got.stderr, log)
	}
}

// What is no regular file stays what it is, and so does a link.
func TestExportKeepsWhatTheNameStandsFor(t *testing.T) {
	d := newFake().start(t)
	dir := t.TempDir()
	fifo, link, file := filepath.Join(dir, "fifo"), filepath.Join(dir, "link"), filepath.Join(dir, "file")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	read := make(chan string, 1)
	go func() {
		data, err := os.ReadFile(fifo)
		read <- fmt.Sprint(string(data), err)
	}()
	for _, target := range []string{fifo, link} {
		if got := finish(t, command(t, d, "export", "-o", target, "a:1")); got.code != 0 {
			t.Errorf("%s: exit code %d: %s", target, got.code, got.stderr)
		}
	}
	if got := <-read; !strings.HasPrefix(got, "archive in oci") {
		t.Errorf("the FIFO had %q", got)
	}
	if fi, err := os.Lstat(link); err != nil || fi.Mode().Type() != os.ModeSymlink {
		t.Errorf("the link is %v (%v)", fi, err)
	}
	if data, err := os.ReadFile(file); err != nil || !strings.HasPrefix(string(data), "archive in oci") {
		t.Errorf("behind the link: %q (%v)", data, err)
	}
}
