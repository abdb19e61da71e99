package functional

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// clientOf is the Go client, as a program would use it.
func clientOf(t *testing.T, d *harness.Daemon) *client.Client {
	t.Helper()
	c := d.Client(t)
	t.Cleanup(c.Close)
	return c
}

func TestFilesAreReadInPartsAndAppendedTo(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	c := clientOf(t, d)
	for _, dir := range []string{"/tmp", "/dev/shm", "/root"} {
		path := dir + "/deep/down/log"
		for _, part := range []string{"one\n", "two\n", "three\n"} {
			if err := c.AppendFile(t.Context(), s.ID, path, strings.NewReader(part), 0o640, ""); err != nil {
				t.Fatalf("append to %s: %v", path, err)
			}
		}
		if got := s.Sh(t, "cat "+path+"; stat -c %a "+path); got != "one\ntwo\nthree\n640\n" {
			t.Errorf("%s says %q", path, got)
		}
		for _, test := range []struct {
			offset, length int64
			want           string
		}{{0, 3, "one"}, {4, 4, "two\n"}, {8, -1, "three\n"}, {8, 100, "three\n"}, {5, 0, ""}} {
			r, err := c.ReadFileRange(t.Context(), s.ID, path, test.offset, test.length)
			if err != nil {
				t.Errorf("%+v: %v", test, err)
				continue
			}
			data, err := io.ReadAll(r)
			_ = r.Close()
			if err != nil || string(data) != test.want {
				t.Errorf("%+v: %q, %v", test, data, err)
			}
		}
		_, err := c.ReadFileRange(t.Context(), s.ID, path, 100, 1)
		wantProblem(t, err, api.CodeInvalid, "bytes=100-100")
	}
	// HEAD and If-Range as any HTTP client uses them.
	req, err := http.NewRequestWithContext(t.Context(), http.MethodHead, "http://sandboxd/v1/sandboxes/"+s.ID+"/files?path=/tmp/deep/down/log", nil)
	if err != nil {
		t.Fatal(err)
	}
	head, err := d.HTTP.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = head.Body.Close()
	if head.StatusCode != 200 || head.ContentLength != 14 || head.Header.Get("X-File-Mode") != "640" || head.Header.Get("Accept-Ranges") != "bytes" {
		t.Errorf("HEAD: %s %d %v", head.Status, head.ContentLength, head.Header)
	}
	for since, status := range map[string]int{head.Header.Get("Last-Modified"): 206, "Mon, 02 Jan 2006 15:04:05 GMT": 200} {
		req.Method = http.MethodGet
		req.Header.Set("Range", "bytes=0-2")
		req.Header.Set("If-Range", since)
		got, err := d.HTTP.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = got.Body.Close()
		if got.StatusCode != status {
			t.Errorf("If-Range %s: %s", since, got.Status)
		}
	}
	req.Header.Set("Range", "bytes=99-")
	req.Header.Del("If-Range")
	got, err := d.HTTP.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = got.Body.Close()
	if got.StatusCode != 416 || got.Header.Get("Content-Range") != "bytes */14" || got.Header.Get("Content-Type") != api.TypeProblem {
		t.Errorf("a range that there is not: %s %v", got.Status, got.Header)
	}
}

// An append that comes to nothing, because the file system is full or the client breaks off,
// leaves nothing that was not there.
func TestRefusedAppendsLeaveNothing(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	c := clientOf(t, d)
	s.Sh(t, "mkdir /tmp/empty; echo one >/dev/shm/there; cat /dev/zero >/dev/shm/full 2>/dev/null; true")
	for _, path := range []string{"/dev/shm/log", "/dev/shm/deep/down/log"} {
		err := c.AppendFile(t.Context(), s.ID, path, strings.NewReader("two\n"), 0, "")
		wantProblem(t, err, api.CodeConflict, path)
	}
	if got := s.Sh(t, "cd /dev/shm; find . | sort; cat there"); got != ".\n./full\n./there\none\n" {
		t.Errorf("in a full file system there is now\n%s", got)
	}
	for _, path := range []string{"/tmp/empty/log", "/tmp/empty/deep/down/log"} {
		if err := c.AppendFile(t.Context(), s.ID, path, iotest.ErrReader(errors.New("broken off")), 0, ""); err == nil {
			t.Error("a body that breaks off is no error")
		}
	}
	harness.Eventually(t, func() error { // the client is not told when that is done
		if got := s.Sh(t, "find /tmp/empty"); got != "/tmp/empty\n" {
			return fmt.Errorf("there is now\n%s", got)
		}
		return nil
	})
	if err := c.AppendFile(t.Context(), s.ID, "/tmp/empty/nothing", strings.NewReader(""), 0, ""); err != nil {
		t.Error(err)
	}
	if got := s.Sh(t, "stat -c %s /tmp/empty/nothing"); got != "0\n" {
		t.Errorf("nothing, appended to nothing, is %q", got)
	}
}

func TestTreesAreListedMadeMovedAndRemoved(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	c := clientOf(t, d)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, base := range []string{"/tmp", "/dev/shm", "/var"} {
		t.Run(base, func(t *testing.T) {
			top := base + "/top"
			must(c.MakeDirectory(t.Context(), s.ID, api.MakeDirectory{Path: top + "/a/b", Parents: true, Mode: "0711"}))
			must(c.MakeDirectory(t.Context(), s.ID, api.MakeDirectory{Path: top + "/a/b", Parents: true}))
			wantProblem(t, c.MakeDirectory(t.Context(), s.ID, api.MakeDirectory{Path: top + "/a/b"}), api.CodeExists, top+"/a/b")
			wantProblem(t, c.MakeDirectory(t.Context(), s.ID, api.MakeDirectory{Path: top + "/no/b"}), api.CodeNotFound)
			must(c.WriteFile(t.Context(), s.ID, top+"/a/f", strings.NewReader("12345"), 0o600, ""))
			s.Sh(t, "cd "+top+" && ln -s a/f link && mkfifo fifo && printf x >\"$(printf 'odd\\377')\"")

			list, err := c.ListFiles(t.Context(), s.ID, top, 3)
			must(err)
			want := []api.FileEntry{
				{Path: top + "/a", Type: api.TypeDirectory, Mode: "0755"},
				{Path: top + "/a/b", Type: api.TypeDirectory, Mode: "0711"},
				{Path: top + "/a/f", Type: api.TypeFile, Mode: "0600", Size: 5},
				{Path: top + "/fifo", Type: api.TypeFIFO, Mode: "0644"},
				{Path: top + "/link", Type: api.TypeSymlink, Mode: "0777", Target: "a/f"},
				{Path: top + "/odd\uFFFD", PathBytes: []byte(top + "/odd\xff"), Type: api.TypeFile, Mode: "0644", Size: 1},
			}
			for i := range want {
				want[i].User, want[i].Group = "root", "root"
				if want[i].Type == api.TypeDirectory || want[i].Type == api.TypeSymlink {
					want[i].Size = list.Entries[min(i, len(list.Entries)-1)].Size
				}
			}
			if diff := cmp.Diff(want, list.Entries, cmpopts.IgnoreFields(api.FileEntry{}, "MTime")); diff != "" || list.More {
				t.Error(diff, list.More)
			}
			var streamed []string
			more, err := c.ListEachFile(t.Context(), s.ID, top, 1, func(e api.FileEntry) error {
				streamed = append(streamed, e.Path)
				return nil
			})
			if err != nil || more || len(streamed) != 4 {
				t.Errorf("streamed: %q, %v, %v", streamed, more, err)
			}

			// Binary content goes both ways.
			must(c.MoveFile(t.Context(), s.ID, api.MoveFile{FromBytes: []byte(top + "/odd\xff"), ToBytes: []byte(top + "/odd\xfe")}))
			e, err := c.StatFile(t.Context(), s.ID, top+"/odd\xfe", false)
			if err != nil || !bytes.Equal(e.PathBytes, []byte(top+"/odd\xfe")) {
				t.Errorf("%+v, %v", e, err)
			}
			e, err = c.StatFile(t.Context(), s.ID, top+"/link", true)
			if err != nil || e.Type != api.TypeFile || e.Size != 5 {
				t.Errorf("%+v, %v", e, err)
			}

			move := func(from, to string, overwrite bool) error {
				return c.MoveFile(t.Context(), s.ID, api.MoveFile{From: from, To: to, Overwrite: overwrite})
			}
			wantProblem(t, move(top+"/a", top+"/a/b/c", false), api.CodeInvalid, "into itself")
			wantProblem(t, move(top+"/a", top+"/./a", true), api.CodeInvalid, "same")
			wantProblem(t, move(top+"/a/f", top+"/link", false), api.CodeExists, top+"/link")
			wantProblem(t, move(top+"/a/f", top+"/nowhere/f", false), api.CodeNotFound, "/nowhere")
			wantProblem(t, move("/", top+"/x", false), api.CodeConflict, "mount point")
			wantProblem(t, move(top+"/a", "/proc/a", false), api.CodeInvalid)
			must(move(top+"/a/f", top+"/link", true))
			must(move(top+"/a", top+"/moved", false))
			if got := s.Sh(t, "cd "+top+" && ls && cat link"); got != "fifo\nlink\nmoved\nodd\xfe\n12345" && !strings.HasPrefix(got, "fifo\nlink\nmoved\n") {
				t.Errorf("after the moves: %q", got)
			}

			wantProblem(t, c.RemoveFile(t.Context(), s.ID, top, false), api.CodeConflict, "recursive=true")
			must(c.RemoveFile(t.Context(), s.ID, top+"/fifo", false))
			must(c.RemoveFile(t.Context(), s.ID, top, true))
			wantProblem(t, c.RemoveFile(t.Context(), s.ID, top, true), api.CodeNotFound)
		})
	}
	for _, path := range []string{"/", "/dev/shm", "/proc", "/dev", "/proc/1", "/sys/kernel"} {
		if err := c.RemoveFile(t.Context(), s.ID, path, true); err == nil {
			t.Errorf("%s was removed", path)
		} else if p := (*api.Problem)(nil); !errors.As(err, &p) || p.Code != api.CodeConflict && p.Code != api.CodeInvalid {
			t.Errorf("remove %s: %v", path, err)
		}
	}
	if got := s.Sh(t, "ls /dev/null /proc/self/stat"); got != "/dev/null\n/proc/self/stat\n" {
		t.Errorf("left is %q", got)
	}
	wantProblem(t, c.MakeDirectory(t.Context(), s.ID, api.MakeDirectory{Path: "/proc/x"}), api.CodeInvalid)
	list, err := c.ListFiles(t.Context(), s.ID, "/", 200)
	if err != nil || !list.More || len(list.Entries) == 0 {
		t.Errorf("all of it: %d entries, %v, %v", len(list.Entries), list != nil && list.More, err)
	}
}

func TestOwnersOfFilesAreTheSandboxsOwn(t *testing.T) {
	testenv.RequireSubIDs(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	c := clientOf(t, d)
	if err := errors.Join(
		c.MakeDirectory(t.Context(), s.ID, api.MakeDirectory{Path: "/tmp/a/b", Parents: true, User: "1000:1001"}),
		c.AppendFile(t.Context(), s.ID, "/tmp/a/f", strings.NewReader("x"), 0, "1000:1001"),
	); err != nil {
		t.Fatal(err)
	}
	var tarball bytes.Buffer
	tarball.Write(harness.Tar(t,
		harness.File{Name: "dir/", Type: '5'}, harness.File{Name: "empty-dir/", Type: '5'}, harness.File{Name: "dir/empty"},
		harness.File{Name: "dir/f", Body: "f"}, harness.File{Name: "hard", Type: '1', Link: "dir/f"}, harness.File{Name: "soft", Type: '2', Link: "../nowhere"}))
	if err := d.Call(t.Context(), "PUT", "/v1/sandboxes/"+s.ID+"/archive?path=/tmp/a/in&user=1000:1001", tarball.Bytes(), nil); err != nil {
		t.Fatal(err)
	}
	if got := s.Sh(t, "cd /tmp/a && stat -c '%u:%g %F %h %n' . b f in in/dir in/empty-dir in/dir/empty in/hard in/soft"); got != `1000:1001 directory 4 .
1000:1001 directory 2 b
1000:1001 regular file 1 f
1000:1001 directory 4 in
1000:1001 directory 2 in/dir
1000:1001 directory 2 in/empty-dir
1000:1001 regular empty file 1 in/dir/empty
1000:1001 regular file 2 in/hard
1000:1001 symbolic link 1 in/soft
` {
		t.Errorf("inside the sandbox:\n%s", got)
	}
	// And out again, in the sandbox's numbers.
	r, err := c.ArchiveOut(t.Context(), s.ID, "/tmp/a/in")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	entries := untar(t, r)
	slices.Sort(entries)
	if diff := cmp.Diff([]string{
		"dir/ 5 1000:1001", "dir/empty 0 1000:1001", "dir/f 0 1000:1001", "empty-dir/ 5 1000:1001",
		"hard 1 1000:1001 dir/f", "soft 2 1000:1001 ../nowhere",
	}, entries); diff != "" {
		// Which of two names of a file comes first is the file system's choice.
		if !strings.Contains(strings.Join(entries, "\n"), "dir/f 1 1000:1001 hard") {
			t.Error(diff)
		}
	}
}

// untar lists an archive: name, type, owner and target of a link.
func untar(t *testing.T, r io.Reader) []string {
	t.Helper()
	var list []string
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return list
		}
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, strings.TrimSpace(fmt.Sprintf("%s %c %d:%d %s", h.Name, h.Typeflag, h.Uid, h.Gid, h.Linkname)))
	}
}

// watching starts a watch and returns its events.
func watching(ctx context.Context, t *testing.T, d *harness.Daemon, id, path string, recursive bool) (changes <-chan api.FileChange, done <-chan error) {
	t.Helper()
	all, end := make(chan api.FileChange, 10000), make(chan error, 1)
	c := clientOf(t, d)
	go func() {
		end <- c.WatchFiles(ctx, id, path, recursive, func(e api.FileChange) error {
			all <- e
			return nil
		})
		close(all)
	}()
	if e := nextChange(t, all); e.Kind != api.WatchReady || e.Path != path {
		t.Fatalf("the first line is %+v (%v)", e, firstOf(end))
	}
	return all, end
}

func firstOf(c <-chan error) error {
	select {
	case err := <-c:
		return err
	default:
		return nil
	}
}

func nextChange(t *testing.T, all <-chan api.FileChange) api.FileChange {
	t.Helper()
	select {
	case e := <-all:
		return e
	case <-time.After(testenv.HungAfter):
		t.Fatal("nothing is told")
	}
	panic("unreachable")
}

func TestWatchTellsOfChanges(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	for _, base := range []string{"/tmp", "/var", "/dev/shm"} {
		t.Run(base, func(t *testing.T) {
			dir := base + "/watched"
			s.Sh(t, "mkdir -p "+dir+"/sub")
			changes, done := watching(t.Context(), t, d, s.ID, dir, true)
			await := func(want api.FileChange) {
				t.Helper()
				for {
					e := nextChange(t, changes)
					if cmp.Equal(e, want) {
						return
					}
					if e.Kind == "" || e.Kind == api.WatchOverflow {
						t.Fatalf("got %+v, want %+v", e, want)
					}
				}
			}
			s.Sh(t, "echo x >"+dir+"/sub/f")
			await(api.FileChange{Kind: api.FileCreated, Path: dir + "/sub/f"})
			await(api.FileChange{Kind: api.FileModified, Path: dir + "/sub/f"})
			s.Sh(t, "chmod 600 "+dir+"/sub/f; mkdir -p "+dir+"/new/deeper; echo x >"+dir+"/new/deeper/g; mv "+dir+"/sub/f "+dir+"/moved")
			await(api.FileChange{Kind: api.FileAttributes, Path: dir + "/sub/f"})
			await(api.FileChange{Kind: api.FileCreated, Path: dir + "/new", Type: api.TypeDirectory})
			await(api.FileChange{Kind: api.FileCreated, Path: dir + "/new/deeper", Type: api.TypeDirectory})
			await(api.FileChange{Kind: api.FileCreated, Path: dir + "/new/deeper/g"})
			await(api.FileChange{Kind: api.FileMoved, From: dir + "/sub/f", To: dir + "/moved"})
			// The watch sees writes through the API too: a file appears under its name by a move.
			if err := s.Put(t.Context(), dir+"/new/put", []byte("x")); err != nil {
				t.Fatal(err)
			}
			for e := nextChange(t, changes); e.To != dir+"/new/put"; e = nextChange(t, changes) {
			}
			s.Sh(t, "rm -r "+dir)
			await(api.FileChange{Kind: api.FileDeleted, Path: dir})
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

// A watch is no use of a sandbox: that ends when it is idle, and the watch says so.
func TestWatchKeepsNothingAlive(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	changes, done := watching(t.Context(), t, d, s.ID, "/tmp", true)
	// Only now: to begin may take longer than that.
	if err := d.Call(t.Context(), http.MethodPatch, "/v1/sandboxes/"+s.ID, api.UpdateSandbox{IdleTimeout: 2}, nil); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		wantProblem(t, err, api.CodeGone, s.ID+"|"+s.Name)
	case <-time.After(testenv.HungAfter):
		t.Error("the sandbox does not end")
	}
	for e := range changes {
		t.Errorf("told: %+v", e)
	}

	s = d.Create(t, api.CreateSandbox{})
	ctx, cancel := context.WithCancel(t.Context())
	_, done = watching(ctx, t, d, s.ID, "/tmp", false)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	_, done = watching(t.Context(), t, d, s.ID, "/tmp", false)
	s.Delete(t)
	wantProblem(t, <-done, api.CodeGone, s.ID+"|"+s.Name)
}

func TestFilesCommand(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Name: "filed"})
	files := func(stdin string, args ...string) string {
		t.Helper()
		got := d.CLIInput(t, strings.NewReader(stdin), append([]string{"files"}, args...)...)
		if got.Code != 0 {
			t.Fatalf("files %q: %+v", args, got)
		}
		return got.Stdout
	}
	files("", "mkdir", "-p", "filed", "/tmp/a/b", "--mode", "700")
	files("hello\n", "write", "filed", "/tmp/a/f", "--mode", "600")
	files("world\n", "write", "-a", "filed", "tmp/a/f")
	if got := files("", "cat", "filed", "/tmp/a/f"); got != "hello\nworld\n" {
		t.Errorf("cat: %q", got)
	}
	if got := files("", "cat", "filed", "/tmp/a/f", "--offset", "6", "--length", "3"); got != "wor" {
		t.Errorf("cat of a part: %q", got)
	}
	files("", "mv", "filed", "/tmp/a/f", "/tmp/a/b/")
	s.Sh(t, "ln -s b/f /tmp/a/link; : >\"$(printf '/tmp/a/evil\\033[31m\\377')\"")
	out := files("", "ls", "filed", "/tmp/a", "--depth", "2")
	for _, want := range []string{"directory", "0700", "root:root", "b/f", "link -> b/f", `evil\x1b[31m\xff`} {
		if !strings.Contains(out, want) {
			t.Errorf("ls says nothing of %q:\n%s", want, out)
		}
	}
	if strings.ContainsRune(out, '\x1b') {
		t.Errorf("a name acts on the terminal: %q", out)
	}
	var list api.FileList
	if err := json.Unmarshal([]byte(files("", "ls", "--json", "filed", "/tmp/a")), &list); err != nil || len(list.Entries) != 3 {
		t.Errorf("%+v, %v", list, err)
	}
	var e api.FileEntry
	if err := json.Unmarshal([]byte(files("", "stat", "-L", "--json", "filed", "/tmp/a/link")), &e); err != nil || e.Size != 12 || e.Mode != "0600" {
		t.Errorf("%+v, %v", e, err)
	}
	if got := files("", "stat", "filed", "/tmp/a/link"); !strings.Contains(got, "symlink") {
		t.Errorf("stat: %q", got)
	}
	if got := d.CLI(t, "files", "rm", "filed", "/tmp/a"); got.Code != 1 || !strings.Contains(got.Stderr, "not empty") {
		t.Errorf("rm of a full directory: %+v", got)
	}
	files("", "rm", "-r", "filed", "/tmp/a")
	if got := d.CLI(t, "files", "ls", "filed", "/tmp/a"); got.Code != 1 || !strings.Contains(got.Stderr, "/tmp/a") {
		t.Errorf("ls of nothing: %+v", got)
	}
}

// More entries than one answer holds.
func TestListOfManyFiles(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	s.Sh(t, "mkdir /dev/shm/many && cd /dev/shm/many && seq -f %06g 1 12000 | xargs touch")
	c := clientOf(t, d)
	list, err := c.ListFiles(t.Context(), s.ID, "/dev/shm/many", 1)
	if err != nil || len(list.Entries) != 10000 || !list.More {
		t.Fatalf("%d entries, %v", len(list.Entries), err)
	}
	n := 0
	if more, err := c.ListEachFile(t.Context(), s.ID, "/dev/shm/many", 1, func(api.FileEntry) error { n++; return nil }); err != nil || more || n != 12000 {
		t.Errorf("%d entries, %v, %v", n, more, err)
	}
	var few api.FileList
	if err := d.Call(t.Context(), "GET", fmt.Sprintf("/v1/sandboxes/%s/list?path=%s&limit=5", s.ID, url.QueryEscape("/dev/shm/many")), nil, &few); err != nil || len(few.Entries) != 5 || !few.More {
		t.Errorf("%+v, %v", few, err)
	}
}
