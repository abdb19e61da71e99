package docker

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// attachedClients is how many clients are attached when a process is killed.
const attachedClients = 50

// attached attaches that many clients to the output of a container. The channel has what each has
// read when its connection ends.
func (f *face) attached(t *testing.T, name string) <-chan string {
	t.Helper()
	read := make(chan string, attachedClients)
	for range attachedClients {
		conn, err := new(net.Dialer).DialContext(t.Context(), "unix", f.socket)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		fmt.Fprintf(conn, "POST /v1.51/containers/%s/attach?stream=1&stdout=1&stderr=1 HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n", name)
		in := bufio.NewReader(conn)
		resp, err := http.ReadResponse(in, nil) // reads the head
		if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
			t.Fatalf("attach: %+v, %v", resp, err)
		}
		go func() { read <- frames(in) }()
	}
	return read
}

// frames returns the bytes of the frames that come before the end of a connection.
func frames(in io.Reader) string {
	var all strings.Builder
	for {
		var head [8]byte
		if _, err := io.ReadFull(in, head[:]); err != nil {
			return all.String()
		}
		if _, err := io.CopyN(&all, in, int64(binary.BigEndian.Uint32(head[4:]))); err != nil {
			return all.String()
		}
	}
}

// The face and then the daemon are killed while a container writes, with clients attached and
// docker wait and docker logs under way. The container goes on, clients connect again, and no byte
// is lost.
func TestKillsUnderAttachedClients(t *testing.T) {
	f := start(t)
	f.images(t)
	docker := filepath.Join(f.bin, "docker")
	const lines = 20000 // of each part, which is more than pipes hold
	const script = `for part in 1 2 3; do read go; i=0; while [ $i -lt 20000 ]; do echo "$part $i"; i=$((i+1)); done; done; exit 5`
	var want strings.Builder
	var last string
	for part := 1; part <= 3; part++ {
		begin := want.Len()
		for i := range lines {
			fmt.Fprintf(&want, "%d %d\n", part, i)
		}
		last = want.String()[begin:]
	}
	f.must(t, docker, "run", "-d", "-i", "--name", "box", image, "sh", "-c", script)
	goOn := func() {
		t.Helper()
		if err := f.Client(t).WriteStdin(t.Context(), "box", api.MainExec, strings.NewReader("go\n"), false); err != nil {
			t.Fatal(err)
		}
	}
	client := func(args ...string) <-chan string {
		ended := make(chan string, 1)
		argv := append([]string{docker}, args...)
		go func() {
			_, out, _, err := program(t.Context(), f.socket, f.home, "", argv)
			if err != nil {
				out = err.Error()
			}
			ended <- out
		}()
		return ended
	}
	ended := func(all <-chan string) {
		t.Helper()
		for range attachedClients {
			if got := <-all; !strings.Contains(want.String(), got) {
				t.Errorf("a client has read %q", clip(got))
			}
		}
	}
	var cut []<-chan string // of clients that a kill may have cut off: one that was slow to connect goes on

	all := f.attached(t, "box")
	cut = append(cut, client("wait", "box"), client("logs", "-f", "box"))
	pid := facePID(t, f)
	goOn()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ended(all)
	f.http.CloseIdleConnections()
	f.await(t)

	all = f.attached(t, "box")
	cut = append(cut, client("wait", "box"), client("logs", "-f", "box"))
	goOn()
	f.Kill9(t)
	ended(all)
	f.Launch(t)
	f.http.CloseIdleConnections()
	f.await(t)

	harness.Eventually(t, func() error { // the second part has been written
		if n := strings.Count(f.must(t, docker, "logs", "box"), "\n"); n < 2*lines {
			return fmt.Errorf("%d lines", n)
		}
		return nil
	})
	all = f.attached(t, "box")
	wait, logs := client("wait", "box"), client("logs", "-f", "box")
	goOn()
	for range attachedClients {
		if got := <-all; got != last {
			t.Errorf("a client has read %d bytes of %d", len(got), len(last))
		}
	}
	if got := <-wait; got != "5\n" {
		t.Errorf("docker wait: %q", got)
	}
	if got := <-logs; got != want.String() {
		t.Errorf("docker logs -f: %d bytes of %d", len(got), want.Len())
	}
	if got := f.must(t, docker, "logs", "box"); got != want.String() {
		t.Errorf("docker logs: %d bytes of %d", len(got), want.Len())
	}
	for _, c := range cut {
		if got := <-c; got != "5\n" && !strings.HasPrefix(want.String(), got) {
			t.Errorf("a client that was cut off: %q", clip(got))
		}
	}
	f.must(t, docker, "rm", "box")
}

// maxContainers is how many sandboxes a daemon holds.
const maxContainers = 1000

// As many containers as there can be are listed, in bounded memory, and one more is refused.
func TestManyContainersAreListed(t *testing.T) {
	testenv.SameForAll(t)
	f := serve(t)
	f.images(t)
	n := testenv.Rounds(300, maxContainers)
	made := make(map[string]string, n) // names by ID
	for i := range n {
		name := fmt.Sprintf("box-%d", i)
		status, answer := f.post(t, "/v1.51/containers/create?name="+name, map[string]any{
			"Image": image, "Cmd": []string{"sleep", "1000"}, "Labels": map[string]string{"kind": fmt.Sprint(i % 10)},
		})
		var doc struct{ ID string }
		if err := json.Unmarshal([]byte(answer), &doc); err != nil || status != http.StatusCreated {
			t.Fatalf("create %s: %d %s", name, status, answer)
		}
		made[doc.ID] = "/" + name
	}
	list := func(query string) map[string]string {
		t.Helper()
		status, answer := f.do(t, "GET", "/v1.51/containers/json?"+query, "", nil)
		var rows []struct {
			ID    string `json:"Id"`
			Names []string
			State string
		}
		if err := json.Unmarshal([]byte(answer), &rows); err != nil || status != http.StatusOK {
			t.Fatalf("list: %d %s", status, clip(answer))
		}
		got := make(map[string]string, len(rows))
		for _, r := range rows {
			if len(r.Names) != 1 || made[r.ID] != r.Names[0] || r.State != "created" {
				t.Errorf("%+v", r)
			}
			got[r.ID] = r.Names[0]
		}
		if len(got) != len(rows) {
			t.Errorf("%d rows of %d containers", len(rows), len(got))
		}
		return got
	}
	if n == maxContainers {
		if status, answer := f.post(t, "/v1.51/containers/create", map[string]any{"Image": image}); status != http.StatusConflict || !strings.Contains(answer, "too many sandboxes") {
			t.Errorf("one more: %d %s", status, answer)
		}
	}
	before := resident(t, f)
	for query, want := range map[string]int{
		"all=1": n, "": 0, "all=1&limit=7": 7, `all=1&filters={"label":["kind=3"]}`: n / 10, `all=1&filters={"name":["^/box-7$"]}`: 1,
	} {
		if got := list(query); len(got) != want {
			t.Errorf("?%s: %d containers, want %d", query, len(got), want)
		}
	}
	after := resident(t, f)
	t.Logf("%d containers: face and daemon had at most %d MiB before the lists, and %d MiB after them", n, before>>20, after>>20)
	if most := int64(128<<20) + int64(n)*(64<<10); after > most {
		t.Errorf("%d bytes, more than %d", after, most)
	}
	if status, answer := f.do(t, "POST", "/v1.51/containers/prune", "", nil); status != http.StatusOK {
		t.Errorf("prune: %d %s", status, clip(answer))
	}
	if left := list("all=1"); len(left) != 0 {
		t.Errorf("%d are left", len(left))
	}
}

// resident returns the most memory that face and daemon have had together.
func resident(t *testing.T, f *face) (sum int64) {
	t.Helper()
	for _, pid := range []int{facePID(t, f), f.PID()} {
		file, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			t.Fatal(err)
		}
		err = errors.New("no VmHWM")
		for lines := bufio.NewScanner(file); lines.Scan(); {
			var kib int64
			if _, serr := fmt.Sscanf(lines.Text(), "VmHWM: %d kB", &kib); serr == nil {
				sum, err = sum+kib<<10, nil
			}
		}
		_ = file.Close() // only read
		if err != nil {
			t.Fatal(err)
		}
	}
	return sum
}
