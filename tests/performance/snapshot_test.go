package performance

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// written makes a sandbox that has written 1,000 files of 10 KB.
func written(b *testing.B) (*harness.Daemon, *harness.Sandbox) {
	b.Helper()
	testenv.RequireUserNS(b)
	d := harness.Start(b, harness.Options{})
	s := d.Create(b, api.CreateSandbox{})
	s.Sh(b, `mkdir /tmp/files; head -c 10240 /dev/urandom > /tmp/files/0; for i in $(seq 999); do cp /tmp/files/0 /tmp/files/$i; done`)
	return d, s
}

// BenchmarkSnapshot is a snapshot of a sandbox that has written 1,000 files of 10 KB, on disk when
// it is answered, against the like files written on the host by one program and synced.
func BenchmarkSnapshot(b *testing.B) {
	d, s := written(b)
	content := bytes.Repeat([]byte("0123456789"), 1024)
	dir := filepath.Join(b.TempDir(), "files")
	var own []time.Duration // without what removes the last one
	compare(b,
		side{name: "snapshot-and-removal", run: func() error {
			var snap api.Snapshot
			began := time.Now()
			if err := d.Call(b.Context(), http.MethodPost, "/v1/sandboxes/"+s.ID+"/snapshots", api.TakeSnapshot{}, &snap); err != nil {
				return err
			}
			own = append(own, time.Since(began))
			return d.Call(b.Context(), http.MethodDelete, "/v1/snapshots/"+snap.ID, nil, nil)
		}},
		side{name: "host-and-removal", run: func() error {
			if err := os.Mkdir(dir, 0o755); err != nil {
				return err
			}
			for i := range 1000 {
				if err := os.WriteFile(filepath.Join(dir, strconv.Itoa(i)), content, 0o644); err != nil {
					return err
				}
			}
			f, err := os.Open(dir)
			if err != nil {
				return err
			}
			return errors.Join(unix.Syncfs(int(f.Fd())), f.Close(), os.RemoveAll(dir))
		}})
	report(b, "snapshot", own[warmUp:])
}

// BenchmarkFork is twenty forks of such a sandbox, until all of them take execs.
func BenchmarkFork(b *testing.B) {
	d, s := written(b)
	var times []time.Duration
	for i := range warmUp + b.N {
		var out api.SandboxForked
		began := time.Now()
		if err := d.Call(b.Context(), http.MethodPost, "/v1/sandboxes/"+s.ID+"/fork", api.ForkSandbox{Count: 20}, &out); err != nil {
			b.Fatal(err)
		}
		if i >= warmUp {
			times = append(times, time.Since(began))
		}
		if len(out.Sandboxes) != 20 {
			b.Fatal(fmt.Errorf("%d forks", len(out.Sandboxes)))
		}
		for _, f := range out.Sandboxes {
			d.Sandbox(f).Delete(b)
		}
	}
	report(b, "fork20", times)
}
