package functional

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// mountBase is an image with busybox, and files where mounts come to lie.
func mountBase(t *testing.T, name string) string {
	t.Helper()
	files := append(harness.Busybox(t), harness.File{Name: "old/", Type: tar.TypeDir}, harness.File{Name: "old/kept", Body: "of the image\n"},
		harness.File{Name: "link", Type: tar.TypeSymlink, Link: "old"})
	return harness.LyingRegistry(t, nil).Push(t, name, harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}}, harness.Layer(t, "gzip", harness.Tar(t, files...))))
}

// layerNames returns the names in the layers of an image above its base's.
func layerNames(t *testing.T, d *harness.Daemon, reference string, base int) []string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "out.tar")
	if got := d.CLI(t, "export", "--format", "docker", "-o", out, reference); got.Code != 0 {
		t.Fatalf("%+v", got)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	var detail api.ImageDetail
	if err := d.Call(t.Context(), "GET", "/v1/images/inspect?reference="+reference, nil, &detail); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, part := range detail.Parts[base:] {
		digest := strings.TrimPrefix(part.Digest, "sha256:")
		diffID := strings.TrimPrefix(part.DiffID, "sha256:")
		for in := tar.NewReader(bytes.NewReader(data)); ; {
			h, err := in.Next()
			if err != nil {
				break
			}
			if !strings.Contains(h.Name, digest) && !strings.Contains(h.Name, diffID) {
				continue
			}
			body, _ := io.ReadAll(in)
			if z, err := gzip.NewReader(bytes.NewReader(body)); err == nil {
				body, _ = io.ReadAll(z)
			}
			for l := tar.NewReader(bytes.NewReader(body)); ; {
				e, err := l.Next()
				if err != nil {
					break
				}
				names = append(names, e.Name)
			}
		}
	}
	slices.Sort(names)
	return names
}

func mountContext(t *testing.T, dockerfile string, more ...harness.File) []byte {
	t.Helper()
	return harness.Tar(t, append([]harness.File{{Name: "Dockerfile", Body: dockerfile}}, more...)...)
}

// Files of binds are there while their RUN runs, and in no layer.
func TestBuildBinds(t *testing.T) {
	d := shared(t)
	base := mountBase(t, "test/mounts:bind")
	context := mountContext(t, `FROM `+base+` AS made
RUN mkdir /made && echo made >/made/file && chown 7:8 /made/file && chmod 640 /made/file
FROM `+base+`
WORKDIR /work
RUN --mount=target=. --mount=type=bind,from=made,source=/made,target=/new/deep,rw \
    --mount=type=bind,source=dir/b,target=/old/kept --mount=type=bind,from=`+base+`,source=/old,target=/link/image \
    cat a dir/b /new/deep/file /old/kept /old/image/kept >/all && ls -A /old >>/all && stat -c '%u %a' /new/deep/file >>/all && echo x >/new/deep/more && rm /new/deep/file
RUN cat /old/kept >/after; ls -A / | grep -c -E '^(new|work)$' >>/after; ls -A /work >>/after
`, harness.File{Name: "a", Body: "a\n"}, harness.File{Name: "dir/", Type: tar.TypeDir}, harness.File{Name: "dir/b", Body: "b\n"})
	d.MustBuild(t, context, api.Build{Tags: []string{"test/built:bind"}})
	s := d.Create(t, api.CreateSandbox{Image: "test/built:bind"})
	owner := "7 640"
	if s.Enforced.IDs == api.IDsSingle {
		owner = "0 640"
	}
	if got := s.Sh(t, "cat /all"); got != "a\nb\nmade\nb\nof the image\nimage\nkept\n"+owner+"\n" {
		t.Errorf("seen by RUN: %q", got)
	}
	if got := s.Sh(t, "cat /after"); got != "of the image\n1\n" {
		t.Errorf("seen by the next RUN: %q", got)
	}
	for _, name := range layerNames(t, d, "test/built:bind", 1) {
		if strings.Contains(name, "new") || strings.HasPrefix(name, "work/") && name != "work/" || strings.HasPrefix(name, "old/") && name != "old/" {
			t.Errorf("%q is in a layer", name)
		}
	}
	// The key has the content of the files: of the context by themselves, of a stage by its layers.
	cached := func(context []byte, want string) {
		t.Helper()
		got := ""
		_, events := d.MustBuild(t, context, api.Build{Tags: []string{"test/built:bind"}})
		for _, e := range events {
			if e.Status == api.BuildCached || e.Status == api.BuildDone && e.Layer != "" {
				got += string(e.Status) + " "
			}
		}
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	cached(context, "cached cached cached cached ")
	cached(bytes.Replace(context, []byte("a\n\x00\x00\x00"), []byte("A\n\x00\x00\x00"), 1), "cached cached done done ")
}

// A read-only bind that a RUN changes fails the build: its changes would be missing.
func TestBuildBindsAreReadOnly(t *testing.T) {
	d := shared(t)
	base := mountBase(t, "test/mounts:ro")
	for script, fails := range map[string]bool{
		"cat /src/a":       false,
		"echo >>/src/a":    true,
		"touch /src/new":   true,
		"rm /src/a":        true,
		"chmod 600 /src/a": true,
		"mv /src /other":   true,
	} {
		_, _, err := d.Build(t.Context(), mountContext(t, "FROM "+base+"\nRUN --mount=type=bind,target=/src "+script+"\n", harness.File{Name: "a", Body: "a"}), api.Build{NoCache: true}, nil)
		switch {
		case !fails && err != nil:
			t.Errorf("%s: %v", script, err)
		case fails && (err == nil || !strings.Contains(err.Error(), "/src")):
			t.Errorf("%s: %v, want a refusal", script, err)
		}
	}
}

// The next build finds the files that a RUN has left in a cache, also of another Dockerfile and
// after a failure. Other ids and steps without it do not. Caches are counted, and pruned.
func TestBuildCaches(t *testing.T) {
	d := harness.Start(t, harness.Options{})
	base := mountBase(t, "test/mounts:cache")
	build := func(dockerfile string) (string, error) {
		t.Helper()
		out := ""
		_, events, err := d.Build(t.Context(), mountContext(t, "FROM "+base+"\n"+dockerfile), api.Build{NoCache: true, Tags: []string{"test/built:cache"}}, nil)
		for _, e := range events {
			if e.Stream != "" {
				out += e.Output
			}
		}
		return out, err
	}
	for i, step := range []struct {
		run, want string
		fails     bool
	}{
		{"RUN --mount=type=cache,target=/old,id=one ls -A /old; echo first >/old/f; ln /old/f /old/hard; mkdir /old/d; chown 3:4 /old/d; chmod 750 /old/d", "", false},
		{"RUN --mount=type=cache,target=/new/place,id=one cat /new/place/hard; stat -c %h:%a /new/place/f /new/place/d; echo second >>/new/place/f", "first\n2:644\n2:750\n", false},
		{"RUN --mount=type=cache,target=/old,id=one cat /old/f; echo third >>/old/f; exit 3", "first\nsecond\n", true},
		{"RUN --mount=type=cache,target=/old,id=one,sharing=locked cat /old/f", "first\nsecond\nthird\n", false},
		{"RUN --mount=type=cache,target=/old,id=one,sharing=private cat /old/f", "first\nsecond\nthird\n", false},
		{"RUN --mount=type=cache,target=/old ls -A /old", "", false},
		{"RUN cat /old/kept; [ ! -e /new ]", "of the image\n", false},
		{"RUN --mount=type=cache,target=/old,id=two,uid=5,gid=6,mode=0700 stat -c %u:%g:%a /old", "5:6:700\n", false},
	} {
		want := step.want
		if i == 7 && d.Create(t, api.CreateSandbox{}).Enforced.IDs == api.IDsSingle {
			continue // there is no second id
		}
		got, err := build(step.run + "\n")
		if !strings.HasPrefix(got, want) || want == "" && got != "" || (err != nil) != step.fails {
			t.Errorf("%s: %q, %v, want %q", step.run, got, err, want)
		}
	}
	var before api.DiskUsage
	if err := d.Call(t.Context(), "GET", "/v1/system/df", nil, &before); err != nil || before.BuildCache.Bytes == 0 {
		t.Errorf("%+v, %v", before.BuildCache, err)
	}
	if got := d.CLI(t, "images", "prune"); got.Code != 0 {
		t.Errorf("%+v", got)
	}
	if got, err := build("RUN --mount=type=cache,target=/old,id=one ls -A /old\n"); got != "" || err != nil {
		t.Errorf("pruned: %q, %v", got, err)
	}
	// An archive that was damaged is an empty cache.
	damaged := 0
	err := filepath.WalkDir(filepath.Join(d.DataDir, "build-caches"), func(p string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			damaged++
			err = os.WriteFile(p, []byte("no archive"), 0o600)
		}
		return err
	})
	if err != nil || damaged == 0 {
		t.Fatal(damaged, err)
	}
	if got, err := build("RUN --mount=type=cache,target=/old,id=one ls -A /old; echo anew >/old/f\n"); got != "" || err != nil {
		t.Errorf("damaged: %q, %v", got, err)
	}
	if got, err := build("RUN --mount=type=cache,target=/old,id=one cat /old/f\n"); got != "anew\n" || err != nil {
		t.Errorf("after it: %q, %v", got, err)
	}
	// It outlives the daemon.
	d.Kill9(t)
	d.Launch(t)
	if got, err := build("RUN --mount=type=cache,target=/old,id=one cat /old/f\n"); got != "anew\n" || err != nil {
		t.Errorf("after a crash: %q, %v", got, err)
	}
}

// One of two steps with a locked cache waits for the other; one with a private cache gets another.
func TestBuildCacheSharing(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	base := mountBase(t, "test/mounts:sharing")
	for sharing, want := range map[string]string{"locked": "left\n", "private": "", "shared": ""} {
		started, gone := make(chan struct{}, 1), make(chan error, 1)
		mount := fmt.Sprintf("FROM %s\nRUN --mount=type=cache,target=/c,id=sharing-%s,sharing=%s ", base, sharing, sharing)
		go func() {
			_, _, err := d.Build(t.Context(), mountContext(t, mount+"echo started; while [ ! -e /c/go ] && [ $((i=i+1)) -lt 300 ]; do sleep 0.01; done; echo left >/c/f\n"), api.Build{NoCache: true}, func(e api.BuildEvent) {
				if strings.Contains(e.Output, "started") {
					started <- struct{}{}
				}
			})
			gone <- err
		}()
		<-started
		out := ""
		_, _, err := d.Build(t.Context(), mountContext(t, mount+"cat /c/f 2>/dev/null; true\n"), api.Build{NoCache: true}, func(e api.BuildEvent) { out += e.Output })
		if err != nil || out != want {
			t.Errorf("%s: %q, %v, want %q", sharing, out, err, want)
		}
		if err := <-gone; err != nil {
			t.Errorf("%s: %v", sharing, err)
		}
	}
}

// A tmpfs has the size that it says, and hides files of the image.
func TestBuildTmpfs(t *testing.T) {
	d := shared(t)
	base := mountBase(t, "test/mounts:tmpfs")
	d.MustBuild(t, mountContext(t, "FROM "+base+`
RUN --mount=type=tmpfs,target=/old,size=1m --mount=type=tmpfs,target=/tmp/deep ls -A /old >/seen; stat -f -c '%b %s' /old >>/seen; echo x >/old/x; echo y >/tmp/deep/y
`), api.Build{Tags: []string{"test/built:tmpfs"}})
	s := d.Create(t, api.CreateSandbox{Image: "test/built:tmpfs"})
	if got := s.Sh(t, "cat /seen; cat /old/kept; ls /old"); got != "256 4096\nof the image\nkept\n" {
		t.Errorf("%q", got)
	}
	for _, name := range layerNames(t, d, "test/built:tmpfs", 1) {
		if strings.Contains(name, "deep") || strings.Contains(name, "old/") && name != "old/" {
			t.Errorf("%q is in a layer", name)
		}
	}
}

// A secret is seen by the RUN that mounts it, as the file or variable that it asks for, and by no
// other; nothing on disk, in a log or an answer has it afterwards.
func TestBuildSecrets(t *testing.T) {
	d := harness.Start(t, harness.Options{})
	base := mountBase(t, "test/mounts:secret")
	const secret = "s3cr3t-of-the-build-0815"
	dir := t.TempDir()
	for name, body := range map[string]string{"secret": secret, "Dockerfile": "FROM " + base + `
RUN --mount=type=secret,id=one --mount=type=secret,id=two,target=/root/.npmrc,mode=0444,uid=5 --mount=type=secret,id=three,env=TOKEN \
    wc -c </run/secrets/one >/seen && stat -L -c '%a' /run/secrets/one /root/.npmrc >>/seen && [ "$(cat /run/secrets/one)" = "$TOKEN" ] && [ "$(cat /root/.npmrc)" = "$TOKEN" ] && echo same >>/seen
RUN ls /run/secrets /root/.npmrc /dev/shm/.secrets 2>/dev/null; echo "[$TOKEN]"; true
RUN --mount=type=secret,id=none [ ! -e /run/secrets/none ]
`} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(body), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	build := exec.CommandContext(t.Context(), harness.Program(t, "sandboxd"), "--socket", d.Socket, "build", "-t", "test/built:secret", "--secret", "id=one,src="+filepath.Join(dir, "secret"),
		"--secret", "id=two,env=MY_SECRET", "--secret", "id=three,type=env,src=MY_SECRET", "-f", filepath.Join(dir, "Dockerfile"), t.TempDir())
	build.Env = append(os.Environ(), "MY_SECRET="+secret)
	out, err := build.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "| []\n") {
		t.Fatalf("%v\n%s", err, out)
	}
	if strings.Contains(string(out), secret) {
		t.Errorf("the build shows it: %s", out)
	}
	s := d.Create(t, api.CreateSandbox{Image: "test/built:secret"})
	if got := s.Sh(t, "cat /seen; ls -A /root/.npmrc /run/secrets 2>/dev/null; true"); got != fmt.Sprintf("%d\n400\n444\nsame\n", len(secret)) {
		t.Errorf("%q", got)
	}
	s.Delete(t)
	for _, name := range layerNames(t, d, "test/built:secret", 1) {
		if strings.Contains(name, "secret") || strings.Contains(name, "npmrc") {
			t.Errorf("%q is in a layer", name)
		}
	}
	// Nothing that the daemon keeps has it, be it compressed.
	scanned := 0
	for _, root := range []string{d.DataDir, filepath.Dir(d.Socket)} {
		err := filepath.WalkDir(root, func(p string, e fs.DirEntry, err error) error {
			if err != nil || !e.Type().IsRegular() {
				return nil //nolint:nilerr // of another sandbox's ids
			}
			data, err := os.ReadFile(p)
			if err != nil {
				return nil //nolint:nilerr // likewise
			}
			scanned++
			if z, err := gzip.NewReader(bytes.NewReader(data)); err == nil {
				plain, _ := io.ReadAll(z)
				data = append(data, plain...)
			}
			if bytes.Contains(data, []byte(secret)) {
				t.Errorf("%s has it", p)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if scanned < 5 || strings.Contains(d.Log(), secret) {
		t.Errorf("%d files; the log has it: %v", scanned, strings.Contains(d.Log(), secret))
	}
	for _, path := range []string{"/v1/events", "/v1/sandboxes", "/v1/images/inspect?reference=test/built:secret", "/v1/system"} {
		response, err := d.Do(t.Context(), "GET", path, nil)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		_ = response.Body.Close()
		if response.StatusCode != 200 || bytes.Contains(body, []byte(secret)) {
			t.Errorf("%s: %d, %.200q", path, response.StatusCode, body)
		}
	}
	// Another secret makes no other image: the key does not have it.
	build = exec.CommandContext(t.Context(), build.Path, build.Args[1:]...)
	build.Env = append(os.Environ(), "MY_SECRET=another")
	if out, err := build.CombinedOutput(); err != nil || strings.Count(string(out), "cached") < 1 {
		t.Errorf("%v\n%s", err, out)
	}
	// One that is required and not given is an error, and so are others.
	for _, tt := range []struct {
		run   string
		flags []string
		want  string
	}{
		{"RUN --mount=type=secret,id=x,required true", nil, "--secret id=x,src=FILE"},
		{"RUN true", []string{"--secret", "src=x"}, "the id is missing"},
		{"RUN true", []string{"--secret", "id=x,src=/not/there"}, "no such file"},
		{"RUN true", []string{"--secret", "id=x,env=NOT_SET_AT_ALL"}, "NOT_SET_AT_ALL is not set"},
		{"RUN true", []string{"--secret", "id=x,src=a,env=B"}, "give one of them"},
	} {
		file := filepath.Join(dir, "Other")
		if err := os.WriteFile(file, []byte("FROM "+base+"\n"+tt.run+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := d.CLI(t, append(append([]string{"build", "-f", file}, tt.flags...), t.TempDir())...); got.Code == 0 || !strings.Contains(got.Stderr, tt.want) {
			t.Errorf("%s %q: %+v, want %q", tt.run, tt.flags, got, tt.want)
		}
	}
}

// Hostile Dockerfiles get nothing outside of their sandbox by mounts.
func TestBuildMountAttacks(t *testing.T) {
	d := shared(t)
	files := harness.Busybox(t)
	for name, to := range map[string]string{"proc-link": "/proc", "dev-link": "/dev/shm", "root-link": "/", "up-link": "../../../..", "etc-link": "/etc", "loop": "loop", "nowhere": "/dev/not/there"} {
		files = append(files, harness.File{Name: name, Type: tar.TypeSymlink, Link: to})
	}
	base := harness.LyingRegistry(t, nil).Push(t, "test/mounts:hostile", harness.Image(t, v1.Config{Env: []string{"PATH=/bin"}}, harness.Layer(t, "gzip", harness.Tar(t, files...))))
	for _, mount := range []string{
		"type=cache,target=/proc-link", "type=cache,target=/proc-link/x", "type=bind,target=/dev-link", "type=bind,target=/root-link", "type=cache,target=/up-link",
		"type=cache,target=/loop/x", "type=bind,target=/nowhere", "type=tmpfs,target=/proc-link", "type=bind,source=../../etc/passwd,target=/x",
		"type=bind,source=/etc/shadow,target=/x", "type=bind,source=out,target=/x",
	} {
		_, _, err := d.Build(t.Context(), mountContext(t, "FROM "+base+"\nRUN --mount="+mount+" cat /x 2>/dev/null; true\n", harness.File{Name: "out", Type: tar.TypeSymlink, Link: "/etc/passwd"}),
			api.Build{NoCache: true}, nil)
		if err == nil {
			t.Errorf("%s: it was built", mount)
		}
	}
	// A program that puts links in the place of its mounts changes nothing but its own files.
	img, _ := d.MustBuild(t, mountContext(t, "FROM "+base+"\nRUN --mount=type=cache,target=/c,id=swapped rm -rf /c; ln -s / /c\nRUN --mount=type=cache,target=/c,id=swapped ls -A /c | wc -l >/n\n"), api.Build{Tags: []string{"test/built:hostile"}})
	if got := d.Create(t, api.CreateSandbox{Image: img.Reference}).Sh(t, "cat /n; ls -d /c 2>/dev/null; true"); got != "0\n" {
		t.Errorf("%q", got)
	}
}
