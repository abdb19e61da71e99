package functional

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

func snapshot(t *testing.T, d *harness.Daemon, id string, req api.TakeSnapshot) api.Snapshot {
	t.Helper()
	var snap api.Snapshot
	if err := d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/"+id+"/snapshots", req, &snap); err != nil {
		t.Fatalf("snapshot: %v", err)
	}
	return snap
}

func fork(t *testing.T, d *harness.Daemon, id string, req api.ForkSandbox) []*harness.Sandbox {
	t.Helper()
	var out api.SandboxForked
	if err := d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/"+id+"/fork", req, &out); err != nil {
		t.Fatalf("fork: %v", err)
	}
	var all []*harness.Sandbox
	for _, s := range out.Sandboxes {
		all = append(all, d.Sandbox(s))
	}
	return all
}

// layersOf counts what lies in the directory of layers, half-made ones among them.
func layersOf(t *testing.T, d *harness.Daemon) int {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(d.DataDir, "layers"))
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// A sandbox's written, changed and deleted files are the same in sandboxes made of its snapshot,
// whatever their kind, and in theirs, with the image of its own or of the host.
func TestSnapshotHasEverything(t *testing.T) {
	d := shared(t)
	registry := harness.LyingRegistry(t, nil)
	base := registry.Push(t, "team/base:1", twoLayers(t, "base"))
	d.MustPull(t, base)
	for _, image := range []string{base, api.HostImage} {
		t.Run(image, func(t *testing.T) {
			s := d.Create(t, api.CreateSandbox{Image: image, Env: []string{"KEPT=yes", "HIDDEN=no"}, Cwd: "/tmp"})
			s.Sh(t, `umask 022; mkdir -p /tmp /data/sub /opt && echo hello > /data/sub/f && ln /data/sub/f /data/hard && ln -s /says /data/link
				mkdir -p /data/gone/deep && echo x > /data/gone/deep/f && rm -r /data/gone
				dd if=/dev/zero of=/data/large bs=1M count=3 2>/dev/null; truncate -s 30M /data/sparse; mkfifo /data/fifo
				echo tail | dd of=/data/sparse bs=1 seek=20971520 conv=notrunc 2>/dev/null
				chmod 4750 /data/hard; chmod 0 /data/large; chmod 1777 /data/sub; echo new > /opt/new; chown 7:8 /opt/new
				rm -f /says /etc/passwd; rm -rf /usr/share/common-licenses; mkdir -p /usr/share/common-licenses; echo mine > /usr/share/common-licenses/mine; rm -f /usr/bin/awk`)
			state := tree + `; ls -A /usr/share/common-licenses; test -e /says || echo gone; test -e /usr/bin/awk || echo gone; ls /data`
			if image == api.HostImage { // the one with python
				s.Sh(t, `python3 -c 'import os; os.setxattr("/opt/new", "user.mine", b"value"); os.setxattr("/data", "user.dir", b"d")'`)
			}
			before := s.Sh(t, state)
			snap := snapshot(t, d, s.ID, api.TakeSnapshot{Name: "one", Labels: map[string]string{"k": "v"}, Comment: "why"})
			if snap.Sandbox != s.ID || snap.Name != "one" || snap.Labels["k"] != "v" || snap.Comment != "why" || snap.Layers != 1 || snap.Entries < 10 || snap.Image != image {
				t.Errorf("%+v", snap)
			}
			s.Sh(t, "echo later > /opt/new; rm /data/link")

			made := d.Create(t, api.CreateSandbox{Snapshot: "one", Env: []string{"HIDDEN=new"}})
			if diff := cmp.Diff(before, made.Sh(t, state)); diff != "" {
				t.Errorf("the sandbox of the snapshot differs (-was +is):\n%s", diff)
			}
			if got := made.Sh(t, "echo $KEPT $HIDDEN; pwd"); got != "yes new\n/tmp\n" || made.Snapshot != snap.ID || made.ImageDigest != s.ImageDigest {
				t.Errorf("in it: %q, %+v", got, made.Sandbox)
			}
			if image == api.HostImage {
				got := made.Sh(t, `python3 -c 'import os; print(os.getxattr("/opt/new", "user.mine"), os.getxattr("/data", "user.dir"), sorted(os.listxattr("/data")))'`)
				if got != "b'value' b'd' ['user.dir']\n" {
					t.Errorf("extended attributes: %q", got)
				}
			}
			if blocks := made.Sh(t, "stat -c %b /data/sparse"); len(blocks) > 4 { // of 512 bytes
				t.Errorf("the sparse file has %s blocks", blocks)
			}
			// A fork of that sandbox, with more.
			made.Sh(t, "rm -r /data/sub; mkdir /data/sub; echo again > /data/sub/other; rm /opt/new")
			second := made.Sh(t, state)
			forks := fork(t, d, made.ID, api.ForkSandbox{Count: 3, Names: []string{"a", "b", "c"}, Env: []string{"MORE=1"}})
			for _, f := range forks {
				if diff := cmp.Diff(second, f.Sh(t, state)); diff != "" {
					t.Errorf("fork %s differs (-was +is):\n%s", f.Name, diff)
				}
				if got := f.Sh(t, "echo $KEPT $HIDDEN $MORE"); got != "yes new 1\n" {
					t.Errorf("environment of the fork: %q", got)
				}
				f.Sh(t, "echo "+f.Name+" > /opt/own")
			}
			for _, f := range forks {
				if got := f.Sh(t, "cat /opt/own"); got != f.Name+"\n" {
					t.Errorf("%s has the file of %s", f.Name, got)
				}
				f.Delete(t)
			}
			made.Delete(t)
			s.Delete(t)
			if err := d.Call(t.Context(), http.MethodDelete, "/v1/snapshots/"+snap.Name, nil, nil); err != nil {
				t.Error(err)
			}
		})
	}
}

// Layers of snapshots stay exactly as long as a snapshot or a sandbox stands on them, in whatever
// order these go, and across a kill of the daemon.
func TestSnapshotLayersAreCollected(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	plain := layersOf(t, d)
	check := func(when string, want int) {
		t.Helper()
		if got := layersOf(t, d) - plain; got != want {
			t.Errorf("%s there are %d layers of snapshots, not %d", when, got, want)
		}
	}
	s.Sh(t, "echo one > /tmp/f")
	one := snapshot(t, d, s.ID, api.TakeSnapshot{Name: "one"})
	remove := func(ref string) {
		t.Helper()
		if err := d.Call(t.Context(), http.MethodDelete, "/v1/snapshots/"+ref, nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	on := d.Create(t, api.CreateSandbox{Snapshot: one.ID})
	remove("one")
	check("with a sandbox on it", 1)
	if got := on.Sh(t, "cat /tmp/f"); got != "one\n" {
		t.Errorf("%q", got)
	}
	forks := fork(t, d, on.ID, api.ForkSandbox{Count: 2})
	check("with forks of that", 2)
	on.Delete(t)
	check("with forks only", 2)
	forks[0].Delete(t)
	check("with one fork", 2)
	d.Kill9(t)
	d.Launch(t)
	if got := forks[1].Sh(t, "cat /tmp/f"); got != "one\n" {
		t.Errorf("after a kill of the daemon: %q", got)
	}
	two := snapshot(t, d, forks[1].ID, api.TakeSnapshot{})
	if two.Layers != 3 {
		t.Errorf("%+v", two)
	}
	forks[1].Delete(t)
	check("with a snapshot of a fork", 3)
	var images api.ImagesRemoved
	if err := d.Call(t.Context(), http.MethodPost, "/v1/images/prune", api.PruneImages{All: true}, &images); err != nil {
		t.Fatal(err)
	}
	check("after a prune", 3)
	var list api.SnapshotList
	if err := d.Call(t.Context(), http.MethodGet, "/v1/snapshots", nil, &list); err != nil || len(list.Snapshots) != 1 || list.Snapshots[0].ID != two.ID {
		t.Errorf("list: %+v, %v", list, err)
	}
	remove(two.ID)
	check("at the end", 0)
}

// The differences from the image, and an image that is committed, are of all levels together.
func TestDiffAndCommitOfWhatStandsOnSnapshots(t *testing.T) {
	d := start(t)
	registry := harness.LyingRegistry(t, nil)
	base := registry.Push(t, "team/base:1", twoLayers(t, "base"))
	d.MustPull(t, base)
	s := d.Create(t, api.CreateSandbox{Image: base})
	s.Sh(t, `umask 022; mkdir -p /data/sub /opt; ln -s x /data/link; echo 1 > /data/sub/f; echo 1 > /opt/new; rm /says; ln /opt/new /opt/hard`)
	one := fork(t, d, s.ID, api.ForkSandbox{})[0]
	one.Sh(t, `rm -r /data/sub; echo 2 > /opt/new; echo 22 > /says; echo 2 > /data/two; rm /opt/hard`)
	snapshot(t, d, one.ID, api.TakeSnapshot{Name: "two"})
	s.Delete(t)
	one.Delete(t)
	two := d.Create(t, api.CreateSandbox{Snapshot: "two"})
	two.Sh(t, `rm /data/two; mkdir -p /data/three; echo 333 > /data/three/f`)
	want := []string{
		"added directory /data 0", "added symlink /data/link 0", "added directory /data/three 0", "added file /data/three/f 4",
		"added directory /opt 0", "added file /opt/new 2", "changed file /says 3",
	}
	if diff := cmp.Diff(want, diffOf(t, d, two.ID)); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
	if v := verified(t, d); v.Snapshots != 2 || len(v.Problems) != 0 {
		t.Errorf("verify: %+v", v)
	}
	before := two.Sh(t, tree)
	var out api.SandboxCommitted
	if err := d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/"+two.ID+"/commit", api.CommitSandbox{Reference: "team/made:1", Comment: "why"}, &out); err != nil {
		t.Fatal(err)
	}
	if out.Image.Layers != 5 { // the image's two, two snapshots', and its own
		t.Errorf("%+v", out.Image)
	}
	made := d.Create(t, api.CreateSandbox{Image: "team/made:1"})
	if diff := cmp.Diff(before, made.Sh(t, tree)); diff != "" {
		t.Errorf("the committed tree differs (-sandbox +image):\n%s", diff)
	}
	if v := verified(t, d); len(v.Problems) != 0 {
		t.Errorf("verify: %+v", v.Problems)
	}

	host := d.Create(t, api.CreateSandbox{})
	host.Sh(t, "echo x > /tmp/mine; mkdir -p /usr/local/mine; echo x > /usr/local/mine/f; rm -f /usr/bin/awk")
	on := fork(t, d, host.ID, api.ForkSandbox{})[0]
	on.Sh(t, "rm /tmp/mine; echo yy > /usr/local/mine/f")
	got := strings.Join(diffOf(t, d, on.ID), "\n")
	if !strings.Contains(got, "added file /usr/local/mine/f 3") || strings.Contains(got, "/tmp/mine") || !strings.Contains(got, "deleted symlink /usr/bin/awk") {
		t.Errorf("changes on the host image:\n%s", got)
	}
}

// A snapshot holds its image.
func TestSnapshotHoldsItsImage(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	registry := harness.LyingRegistry(t, nil)
	base := registry.Push(t, "team/base:1", twoLayers(t, "base"))
	d.MustPull(t, base)
	s := d.Create(t, api.CreateSandbox{Image: base})
	snapshot(t, d, s.ID, api.TakeSnapshot{Name: "keep"})
	s.Delete(t)
	err := d.Call(t.Context(), http.MethodDelete, "/v1/images?reference="+base, nil, nil)
	wantProblem(t, err, api.CodeConflict, "sandboxd snapshots rm keep")
	if err := d.Call(t.Context(), http.MethodPost, "/v1/images/prune", api.PruneImages{All: true}, nil); err != nil {
		t.Fatal(err)
	}
	made := d.Create(t, api.CreateSandbox{Snapshot: "keep"})
	made.Sh(t, "true")
	made.Delete(t)
	if err := d.Call(t.Context(), http.MethodDelete, "/v1/snapshots/keep", nil, nil); err != nil {
		t.Fatal(err)
	}
	if err := d.Call(t.Context(), http.MethodDelete, "/v1/images?reference="+base, nil, nil); err != nil {
		t.Error(err)
	}
}

// A sandbox that writes all the time gets a snapshot whose files are whole, or none and an error.
func TestSnapshotOfOneThatWrites(t *testing.T) {
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{})
	done := make(chan error, 1)
	go func() {
		const script = `i=0; until [ -e /tmp/stop ]; do i=$((i+1)); echo $i > /tmp/new && mv /tmp/new /tmp/f$((i%50)); echo $i >> /tmp/log; done`
		_, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", script}})
		done <- err
	}()
	eventually(t, func() error {
		_, err := s.Inspect(t.Context())
		if err == nil && s.Sh(t, "ls /tmp/f5 2>/dev/null || true") == "" {
			err = errors.New("nothing is written yet")
		}
		return err
	})
	taken := 0
	for i := range 8 {
		var snap api.Snapshot
		err := d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/"+s.ID+"/snapshots", api.TakeSnapshot{Name: fmt.Sprint("n", i)}, &snap)
		if err != nil {
			wantProblem(t, err, api.CodeConflict, "")
			continue
		}
		taken++
		made := d.Create(t, api.CreateSandbox{Snapshot: snap.ID})
		if got := made.Sh(t, `for f in /tmp/f*; do [ -s $f ] || echo empty $f; done; [ -e /tmp/stop ] && echo stopped; exit 0`); got != "" {
			t.Errorf("snapshot %d: %s", i, got)
		}
		made.Delete(t)
	}
	s.Sh(t, "touch /tmp/stop")
	if err := <-done; err != nil {
		t.Error(err)
	}
	t.Logf("%d of 8 snapshots were taken", taken)
	if got := s.Sh(t, "echo on"); got != "on\n" {
		t.Errorf("afterwards: %q", got)
	}
}

func TestSnapshotOfWhatCannotBe(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{Name: "s"})
	layers := layersOf(t, d)
	take := func(id string, req api.TakeSnapshot) error {
		return d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/"+id+"/snapshots", req, nil)
	}
	forked := func(req api.ForkSandbox) error {
		return d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/s/fork", req, nil)
	}
	wantProblem(t, take("nobody", api.TakeSnapshot{}), api.CodeNotFound, "nobody")
	wantProblem(t, take("s", api.TakeSnapshot{Name: "../x"}), api.CodeInvalid, "name")
	wantProblem(t, take("s", api.TakeSnapshot{Comment: "\x00"}), api.CodeInvalid, "comment")
	wantProblem(t, forked(api.ForkSandbox{Count: -1}), api.CodeInvalid, "count")
	wantProblem(t, forked(api.ForkSandbox{Count: 101}), api.CodeInvalid, "count")
	wantProblem(t, forked(api.ForkSandbox{Count: 2, Names: []string{"a"}}), api.CodeInvalid, "names")
	wantProblem(t, forked(api.ForkSandbox{Names: []string{"a", "a"}}), api.CodeInvalid, "names")
	// All or none.
	wantProblem(t, forked(api.ForkSandbox{Names: []string{"x", "y", "s", "z"}}), api.CodeExists, `"s"`)
	if list := d.List(t); len(list) != 1 {
		t.Errorf("%d sandboxes are left", len(list))
	}
	first := snapshot(t, d, "s", api.TakeSnapshot{Name: "n"})
	wantProblem(t, take("s", api.TakeSnapshot{Name: "n"}), api.CodeExists, "n")
	wantProblem(t, take("s", api.TakeSnapshot{Name: first.ID}), api.CodeExists, first.ID)
	for _, req := range []api.CreateSandbox{{Snapshot: "nothing"}, {Snapshot: strings.Repeat("a", 64)}, {Snapshot: "../.."}, {Snapshot: "n", Image: "host"}} {
		if _, err := d.TryCreate(t.Context(), req); err == nil {
			t.Errorf("%+v was made", req)
		}
	}
	s.Sh(t, `d=/deep; for i in $(seq 140); do d=$d/d; done; mkdir -p $d`)
	wantProblem(t, take("s", api.TakeSnapshot{}), api.CodeConflict, "128")
	wantProblem(t, d.Call(t.Context(), http.MethodGet, "/v1/snapshots/nothing", nil, nil), api.CodeNotFound, "nothing")
	wantProblem(t, d.Call(t.Context(), http.MethodDelete, "/v1/snapshots/nothing", nil, nil), api.CodeNotFound, "nothing")
	if err := d.Call(t.Context(), http.MethodDelete, "/v1/snapshots/n", nil, nil); err != nil {
		t.Error(err)
	}
	if got := layersOf(t, d); got != layers {
		t.Errorf("%d layers, there were %d", got, layers)
	}
}

// A sandbox has the files of a snapshot again, and nothing else of it has changed.
func TestRollback(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{Name: "work", Labels: map[string]string{"k": "v"}})
	plain := layersOf(t, d)
	s.Sh(t, "echo one > /tmp/f; echo keep > /tmp/g")
	one := snapshot(t, d, s.ID, api.TakeSnapshot{Name: "one"})
	s.Sh(t, "echo two > /tmp/f; rm /tmp/g; echo new > /tmp/h")
	rollback := func(ref string) (sb api.Sandbox, err error) {
		err = d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/work/rollback", api.RollbackSandbox{Snapshot: ref}, &sb)
		return sb, err
	}
	const look = "cat /tmp/f /tmp/g; ls /tmp/h 2>/dev/null; exit 0"
	for range 2 {
		got, err := rollback("one")
		if err != nil {
			t.Fatal(err)
		}
		if got.ID != s.ID || got.Name != "work" || got.Labels["k"] != "v" || got.State != api.StateRunning || got.Snapshot != one.ID {
			t.Errorf("%+v", got)
		}
		if got := s.Sh(t, look); got != "one\nkeep\n" {
			t.Errorf("after the rollback: %q", got)
		}
		s.Sh(t, "echo three > /tmp/f")
	}
	two := snapshot(t, d, "work", api.TakeSnapshot{Name: "two"})
	if two.Layers != 2 {
		t.Errorf("%+v", two)
	}
	if _, err := rollback("two"); err != nil {
		t.Fatal(err)
	}
	if got := s.Sh(t, look); got != "three\nkeep\n" {
		t.Errorf("rolled back to what stands on the other: %q", got)
	}
	if err := d.Call(t.Context(), http.MethodDelete, "/v1/snapshots/two", nil, nil); err != nil {
		t.Fatal(err)
	}
	// A sandbox that has ended stays so, and unreadable parts of it are named.
	if err := d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/work/stop", nil, nil); err != nil {
		t.Fatal(err)
	}
	if got, err := rollback("one"); err != nil || got.State != api.StateStopped {
		t.Errorf("%+v, %v", got, err)
	}
	if got := layersOf(t, d) - plain; got != 1 {
		t.Errorf("%d layers of snapshots, 1 is needed", got)
	}
	wantProblem(t, d.Call(t.Context(), http.MethodGet, "/v1/sandboxes/work/diff", nil, nil), api.CodeConflict, "start it first")
	d.Kill9(t)
	d.Launch(t)
	if err := d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/work/start", nil, nil); err != nil {
		t.Fatal(err)
	}
	if got := s.Sh(t, look); got != "one\nkeep\n" {
		t.Errorf("started after the rollback: %q", got)
	}

	registry := harness.LyingRegistry(t, nil)
	base := registry.Push(t, "team/base:1", twoLayers(t, "base"))
	d.MustPull(t, base)
	other := d.Create(t, api.CreateSandbox{Image: base})
	snapshot(t, d, other.ID, api.TakeSnapshot{Name: "other"})
	_, err := rollback("other")
	wantProblem(t, err, api.CodeConflict, "another")
	_, err = rollback("nothing")
	wantProblem(t, err, api.CodeNotFound, "nothing")
	_, err = rollback("")
	wantProblem(t, err, api.CodeInvalid, "snapshot")
	if got := s.Sh(t, look); got != "one\nkeep\n" {
		t.Errorf("after what was refused: %q", got)
	}
}

// Whenever the daemon is killed while it takes snapshots, forks and rolls back, the next one has
// whole snapshots and no layer that nothing stands on.
func TestSnapshotsSurviveKills(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{Name: "work"})
	plain := layersOf(t, d)
	s.Sh(t, "for i in $(seq 200); do echo $i > /tmp/f$i; done")
	const whole = "cat /tmp/f* | wc -l"
	snapshot(t, d, "work", api.TakeSnapshot{Name: "first"})
	for round := range testenv.Rounds(4, 8) {
		asked := make(chan struct{})
		go func() {
			defer close(asked)
			// Their outcome is checked below.
			_ = d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/work/snapshots", api.TakeSnapshot{}, nil)
			_ = d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/work/fork", api.ForkSandbox{Count: 2}, nil)
			_ = d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/work/rollback", api.RollbackSandbox{Snapshot: "first"}, nil)
		}()
		select {
		case <-asked:
		case <-time.After(time.Duration(round*40) * time.Millisecond):
		}
		d.Kill9(t)
		<-asked
		d.Launch(t)
		var list api.SnapshotList
		if err := d.Call(t.Context(), http.MethodGet, "/v1/snapshots", nil, &list); err != nil {
			t.Fatal(err)
		}
		for _, sb := range d.List(t) {
			if sb.State != api.StateRunning && sb.Name != "work" { // its creation was cut off, and it was never answered
				d.Sandbox(sb).Delete(t)
				continue
			}
			if sb.State != api.StateRunning { // a rollback was cut off
				if err := d.Call(t.Context(), http.MethodPost, "/v1/sandboxes/"+sb.ID+"/start", nil, nil); err != nil {
					t.Fatalf("round %d: start %+v: %v", round, sb, err)
				}
			}
			if got := strings.TrimSpace(d.Sandbox(sb).Sh(t, whole)); got != "200" {
				t.Errorf("round %d: %s has %s files", round, sb.Name, got)
			}
			if sb.Name != "work" {
				d.Sandbox(sb).Delete(t)
			}
		}
		for _, snap := range list.Snapshots {
			made := d.Create(t, api.CreateSandbox{Snapshot: snap.ID})
			if got := strings.TrimSpace(made.Sh(t, whole)); got != "200" {
				t.Errorf("round %d: snapshot %s has %s files", round, snap.ID, got)
			}
			made.Delete(t)
			if snap.Name != "first" {
				if err := d.Call(t.Context(), http.MethodDelete, "/v1/snapshots/"+snap.ID, nil, nil); err != nil {
					t.Fatal(err)
				}
			}
		}
		eventually(t, func() error { // the rest is removed in the background
			if got := layersOf(t, d) - plain; got != 1 && got != 2 { // work's own, perhaps
				return fmt.Errorf("%d layers of snapshots are left", got)
			}
			return nil
		})
	}
}

// A client that goes away at any instant of a snapshot or a fork leaves no layer, not even one
// completed after it left.
func TestSnapshotThatNobodyWaitsForIsNotKept(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	plain := layersOf(t, d)
	s.Sh(t, "echo one > /tmp/f")
	begun := time.Now()
	snapshot(t, d, s.ID, api.TakeSnapshot{})
	took := time.Since(begun)
	tries := testenv.Rounds(40, 150)
	for i := range tries { // most of them in the second half, where the layer gets its name
		ctx, cancel := context.WithTimeout(t.Context(), took*time.Duration(tries+2*i)/time.Duration(2*tries))
		// Its outcome is checked below.
		_ = d.Call(ctx, http.MethodPost, "/v1/sandboxes/"+s.ID+"/snapshots", api.TakeSnapshot{}, nil)
		cancel()
	}
	eventually(t, func() error {
		var list api.SnapshotList
		if err := d.Call(t.Context(), http.MethodGet, "/v1/snapshots", nil, &list); err != nil {
			return err
		}
		if got := layersOf(t, d) - plain; got != len(list.Snapshots) {
			return fmt.Errorf("%d snapshots have %d layers", len(list.Snapshots), got)
		}
		return nil
	})
}

// A snapshot travels as one file to another daemon that has the image, with all that it stands on.
func TestSnapshotTravels(t *testing.T) {
	d, there := start(t), start(t)
	registry := harness.LyingRegistry(t, nil)
	base := registry.Push(t, "team/base:1", twoLayers(t, "base"))
	d.MustPull(t, base)
	for _, image := range []string{base, api.HostImage} {
		name := "n" + fmt.Sprint(len(image))
		s := d.Create(t, api.CreateSandbox{Image: image, Env: []string{"A=b"}})
		s.Sh(t, `umask 022; mkdir -p /data/sub /opt; ln -s x /data/link; echo 1 > /data/sub/f; ln /data/sub/f /data/hard; truncate -s 1M /data/sparse; rm -f /says /usr/bin/awk; mkdir -p /usr/local/m`)
		on := fork(t, d, s.ID, api.ForkSandbox{})[0]
		on.Sh(t, "rm -r /data/sub; echo 2 > /opt/new; echo 3 > /usr/local/m/f")
		const all = tree + "; cat /usr/local/m/f; ls /usr/bin/awk 2>/dev/null; exit 0"
		before := on.Sh(t, all)
		snapshot(t, d, on.ID, api.TakeSnapshot{Name: name, Labels: map[string]string{"k": "v"}})
		on.Delete(t) // two daemons side by side would see each other's namespaces, whose numbers are used again
		s.Delete(t)
		file := filepath.Join(t.TempDir(), "snapshot.tar")
		if got := d.CLI(t, "snapshots", "export", "-o", file, name); got.Code != 0 {
			t.Fatalf("export: %+v", got)
		}
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		send := func(data []byte, query string) error {
			return there.Call(t.Context(), http.MethodPost, "/v1/snapshots/import"+query, data, nil)
		}
		if image == base {
			wantProblem(t, send(data, ""), api.CodeNotFound, base)
			there.MustPull(t, base)
		}
		layers := layersOf(t, there)
		half := bytes.Replace(data, []byte("2\n"), []byte("9\n"), 1) // the content of /opt/new
		if bytes.Equal(half, data) {
			t.Fatal("nothing was changed")
		}
		wantProblem(t, send(half, ""), api.CodeImage, "")
		wantProblem(t, send(data[:len(data)/2/512*512], ""), api.CodeImage, "")
		wantProblem(t, send([]byte("no tar"), ""), api.CodeImage, "")
		wantProblem(t, send(data, "?name=../x"), api.CodeInvalid, "name")
		if got := layersOf(t, there); got > layers+1 { // the host image's
			t.Errorf("%d layers are left of what was refused, there were %d", got, layers)
		}
		if err := send(data, ""); err != nil {
			t.Fatal(err)
		}
		wantProblem(t, send(data, ""), api.CodeExists, name)
		if err := send(data, "?name=again"); err != nil {
			t.Error(err)
		}
		made := there.Create(t, api.CreateSandbox{Snapshot: name})
		if diff := cmp.Diff(before, made.Sh(t, all)); diff != "" {
			t.Errorf("%s: the tree has changed on the way (-was +is):\n%s", image, diff)
		}
		if got := made.Sh(t, "echo $A"); got != "b\n" {
			t.Errorf("environment: %q", got)
		}
		// It can travel on, and is the same.
		if got := there.CLI(t, "snapshots", "export", "-o", file, name); got.Code != 0 {
			t.Errorf("export of what was imported: %+v", got)
		}
		made.Delete(t)
		for _, ref := range []string{name, "again"} {
			if err := there.Call(t.Context(), http.MethodDelete, "/v1/snapshots/"+ref, nil, nil); err != nil {
				t.Error(err)
			}
		}
	}
}

// Beyond the limit the oldest snapshots go that no sandbox stands on.
func TestSnapshotLimit(t *testing.T) {
	testenv.SameForAll(t)
	d := startWith(t, harness.Options{Args: []string{"--snapshot-limit", "2m"}})
	s := d.Create(t, api.CreateSandbox{})
	s.Sh(t, "dd if=/dev/zero of=/tmp/f bs=1000 count=900 2>/dev/null")
	snapshot(t, d, s.ID, api.TakeSnapshot{Name: "a"})
	d.Create(t, api.CreateSandbox{Snapshot: "a"})
	for _, name := range []string{"b", "c", "d"} {
		snapshot(t, d, s.ID, api.TakeSnapshot{Name: name})
	}
	var list api.SnapshotList
	if err := d.Call(t.Context(), http.MethodGet, "/v1/snapshots", nil, &list); err != nil {
		t.Fatal(err)
	}
	names := ""
	for _, snap := range list.Snapshots {
		names += snap.Name
	}
	if names != "ad" {
		t.Errorf("what is left is %q", names)
	}
	// An imported one is older than all, and is the wanted one now.
	file := filepath.Join(t.TempDir(), "a.tar")
	for _, args := range [][]string{{"snapshots", "export", "-o", file, "a"}, {"snapshots", "import", "--name", "again", file}} {
		if got := d.CLI(t, args...); got.Code != 0 {
			t.Fatalf("%q: %+v", args, got)
		}
	}
	if err := d.Call(t.Context(), http.MethodGet, "/v1/snapshots/again", nil, nil); err != nil {
		t.Errorf("what has just been imported: %v", err)
	}
}

// A file that says it is a snapshot chooses nothing but its sandboxes' own files: nothing mounted,
// nothing of the host's, no name of another snapshot, no more than a layer may have.
func TestSnapshotFileOfAnEnemy(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	digest := s.ImageDigest
	snapshot(t, d, s.ID, api.TakeSnapshot{Name: "mine"})
	file := func(meta string, layers ...[]byte) []byte {
		var ids []string
		for _, l := range layers {
			ids = append(ids, fmt.Sprintf(`"sha256:%x"`, sha256.Sum256(l)))
		}
		files := []harness.File{{Name: "snapshot.json", Body: `{"version":1,"snapshot":{"id":"x","image":"host","image_digest":"` + digest +
			`","cwd":"/","profile":"default","created_at":"2020-01-01T00:00:00Z","rootfs":{"layers":null,"snapshots":[` + strings.Join(ids, ",") + `]}` + meta + `}}`}}
		for i, l := range layers {
			files = append(files, harness.File{Name: fmt.Sprintf("layer-%d.tar", i+1), Body: string(l)})
		}
		return harness.Tar(t, files...)
	}
	send := func(data []byte) error {
		return d.Call(t.Context(), http.MethodPost, "/v1/snapshots/import", data, nil)
	}
	good := harness.Tar(t, harness.File{Name: "tmp/f", Body: "x"})
	layers := layersOf(t, d)
	for name, data := range map[string][]byte{
		"no layer":                 file(""),
		"a name with a path":       file(`,"name":"../x"`, good),
		"a user that is none":      file(`,"user":"-1"`, good),
		"a path that is none":      file(`,"env":["=A"]`, good),
		"an unknown profile":       file(`,"profile":"nonesuch"`, good),
		"an unknown field":         file(`,"mounts":["/"]`, good),
		"a path out of the layer":  file("", harness.Tar(t, harness.File{Name: "../../escape", Body: "x"})),
		"no tar in it":             file("", []byte("no tar")),
		"another layer":            bytes.Replace(file("", good), []byte("tmp/f"), []byte("tmp/g"), 1),
		"too many layers":          file("", slices.Repeat([][]byte{good}, 60)...),
		"more than the layers":     append(file("", good)[:len(file("", good))-1024], harness.Tar(t, harness.File{Name: "more"})...),
		"an image that is not one": bytes.Replace(file("", good), []byte(digest), []byte("sha256:"+strings.Repeat("0", 64)), 1),
	} {
		var p *api.Problem
		if err := send(data); !errors.As(err, &p) || p.Code != api.CodeImage && p.Code != api.CodeNotFound && p.Code != api.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	wantProblem(t, send(file(`,"name":"mine"`, good)), api.CodeExists, "mine")
	if got := layersOf(t, d); got != layers {
		t.Errorf("%d layers, there were %d", got, layers)
	}
	// A mount point is a directory, or nothing is.
	for name, l := range map[string]harness.File{
		"link-host":  {Name: "usr", Type: tar.TypeSymlink, Link: "/host"},
		"link-layer": {Name: "usr", Type: tar.TypeSymlink, Link: "/sandboxes"},
		"file":       {Name: "usr", Body: "x"},
		"whiteout":   {Name: ".wh.usr"},
	} {
		wantProblem(t, send(file(`,"name":"`+name+`"`, harness.Tar(t, l))), api.CodeImage, "/usr")
	}
	if got := layersOf(t, d); got != layers {
		t.Errorf("%d layers, there were %d", got, layers)
	}
	// The good one is good.
	if err := send(file(`,"name":"good"`, good)); err != nil {
		t.Fatal(err)
	}
	if got := d.Create(t, api.CreateSandbox{Snapshot: "good"}).Sh(t, "cat /tmp/f"); got != "x" {
		t.Errorf("%q", got)
	}
	// And is not taken for damaged because we would have written it otherwise.
	if got := d.CLI(t, "snapshots", "export", "-o", filepath.Join(t.TempDir(), "good.tar"), "good"); got.Code != 0 {
		t.Errorf("export: %+v", got)
	}
	if got := d.CLI(t, "images", "--verify"); got.Code != 0 {
		t.Errorf("verify: %+v", got)
	}
}

// A file of 10 GiB of which little was written is taken, forked, verified, exported and imported
// as that little.
func TestSnapshotOfALargeSparseFile(t *testing.T) {
	d := start(t)
	s := d.Create(t, api.CreateSandbox{})
	s.Sh(t, `truncate -s 10G /tmp/disk && echo end | dd of=/tmp/disk bs=1 seek=9999999999 conv=notrunc 2>/dev/null`)
	const look = `stat -c %s /tmp/disk; tail -c +10000000000 /tmp/disk | head -c 4; test $(stat -c %b /tmp/disk) -lt 4096 && echo sparse`
	want := s.Sh(t, look)
	if !strings.HasSuffix(want, "end\nsparse\n") {
		t.Fatalf("in the sandbox: %q", want)
	}
	began := time.Now()
	snap := snapshot(t, d, s.ID, api.TakeSnapshot{Name: "sparse"})
	if snap.Size > 1<<20 {
		t.Errorf("%d bytes were copied", snap.Size)
	}
	// That the zeros are not read either, layer.TestHolesOfASnapshotAreNotCopied shows with 10 TiB of
	// them.
	if took := time.Since(began); testenv.Soaking() && took > 10*time.Second {
		t.Errorf("it took %s", took)
	}
	for _, made := range []*harness.Sandbox{d.Create(t, api.CreateSandbox{Snapshot: "sparse"}), fork(t, d, s.ID, api.ForkSandbox{})[0]} {
		if got := made.Sh(t, look); got != want {
			t.Errorf("in %s: %q, want %q", made.Name, got, want)
		}
	}
	var verified api.ImagesVerified
	if err := d.Call(t.Context(), http.MethodGet, "/v1/images/verify", nil, &verified); err != nil || len(verified.Problems) > 0 {
		t.Errorf("verify: %v, %+v", err, verified.Problems)
	}
	file := filepath.Join(t.TempDir(), "snapshot.tar")
	cli(t, d, "snapshots", "export", "-o", file, "sparse")
	if fi, err := os.Stat(file); err != nil || fi.Size() > 1<<20 {
		t.Errorf("the exported file: %v, %v", fi, err)
	}
	cli(t, d, "snapshots", "import", "--name", "again", file)
	if got := d.Create(t, api.CreateSandbox{Snapshot: "again"}).Sh(t, look); got != want {
		t.Errorf("after an import: %q, want %q", got, want)
	}
}

// Ended sandboxes and kept snapshots are pruned with the command line, and named ones stay.
func TestPrune(t *testing.T) {
	testenv.SameForAll(t)
	d := start(t)
	s := d.Create(t, api.CreateSandbox{Name: "done"})
	kept := d.Create(t, api.CreateSandbox{Name: "kept", Labels: map[string]string{api.LabelKeep: ""}})
	snapshot(t, d, s.ID, api.TakeSnapshot{Name: "old"})
	cli(t, d, "stop", "-t", "0", "done")
	cli(t, d, "stop", "-t", "0", "kept")
	if out := cli(t, d, "prune"); out != "" {
		t.Errorf("pruned within the hour: %q", out)
	}
	if out := cli(t, d, "prune", "--older-than", "0s"); out != "done\n" {
		t.Errorf("pruned %q", out)
	}
	if _, err := os.Stat(filepath.Join(d.DataDir, "sandboxes", s.ID)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its directory: %v", err)
	}
	before := layersOf(t, d)
	if out := cli(t, d, "snapshots", "prune", "--older-than", "0s"); !strings.HasPrefix(out, "old\n1 snapshots") {
		t.Errorf("pruned %q", out)
	}
	if got := layersOf(t, d); got != before-1 {
		t.Errorf("%d layers, there were %d", got, before)
	}
	kept.Delete(t)
}

// cli runs a command that must succeed, and returns its output.
func cli(t *testing.T, d *harness.Daemon, args ...string) string {
	t.Helper()
	got := d.CLI(t, args...)
	if got.Code != 0 {
		t.Fatalf("%q: exit %d, %s", args, got.Code, got.Stderr)
	}
	return got.Stdout
}

// On a file system with shared extents, a sandbox that changes a byte of a large file of its
// image, or of its snapshot, takes the room of that byte: the kernel's copy-up clones
// (docs/decisions/0014).
func TestChangeOfALargeFileIsACloneWhereItCanBe(t *testing.T) {
	dir := testenv.RequireReflink(t)
	t.Setenv("TMPDIR", dir)
	testenv.RequireUserNS(t)
	d := harness.Start(t, harness.Options{})
	used := func() int64 {
		t.Helper()
		var st unix.Statfs_t
		fd, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer fd.Close()
		if err := errors.Join(unix.Syncfs(int(fd.Fd())), unix.Fstatfs(int(fd.Fd()), &st)); err != nil {
			t.Fatal(err)
		}
		return int64(st.Blocks-st.Bfree) * st.Bsize
	}
	s := d.Create(t, api.CreateSandbox{})
	s.Sh(t, "head -c 67108864 /dev/urandom > /tmp/large")
	sum := s.Sh(t, "sha256sum < /tmp/large")
	snapshot(t, d, s.ID, api.TakeSnapshot{Name: "large"})
	made := d.Create(t, api.CreateSandbox{Snapshot: "large"})
	before := used()
	made.Sh(t, "printf x | dd of=/tmp/large bs=1 seek=1000000 conv=notrunc 2>/dev/null")
	if grown := used() - before; grown > 8<<20 {
		t.Errorf("one byte of a file of 64 MiB was changed, and %d bytes of disk are gone", grown)
	}
	if made.Sh(t, "sha256sum < /tmp/large") == sum || s.Sh(t, "sha256sum < /tmp/large") != sum {
		t.Error("the change is in the wrong place")
	}
}
