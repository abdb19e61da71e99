// Package clients measures Docker's own clients with the Docker face of sandboxd, and with dockerd.
// `make bench-docker` runs it as root, because of dockerd, and writes the figures to a section of
// docs/performance.md.
//
// The sides take turns, and the first one changes from round to round: a loaded machine slows all
// of them.
package clients

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

var (
	rounds = flag.Int("rounds", 40, "rounds that count")
	uid    = flag.Int("uid", 0, "with -gid, another daemon of sandboxd is of this user; 0: none is")
	gid    = flag.Int("gid", 0, "")
	rows   = flag.String("rows", "", "`file` for the rows of the tables; empty: none")
)

// side is a daemon that serves Docker's API.
type side struct {
	name, socket string
	pids         func() []int // of the processes that serve it
	env          []string
}

func (s *side) command(b *testing.B, argv ...string) *exec.Cmd {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), testenv.HungAfter) // it only ends what hangs
	b.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = s.env
	return cmd
}

// run runs a command that must succeed, and returns its output.
func (s *side) run(b *testing.B, argv ...string) string {
	b.Helper()
	var stderr bytes.Buffer
	cmd := s.command(b, argv...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		b.Fatalf("%s: %q: %v: %s", s.name, argv, err, &stderr)
	}
	return strings.TrimSpace(string(out))
}

// resident is the resident memory of the processes that serve, in MiB.
func (s *side) resident(b *testing.B) float64 {
	b.Helper()
	sum := 0
	for _, pid := range s.pids() {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			b.Fatal(err)
		}
		_, rest, ok := strings.Cut(string(data), "VmRSS:")
		kib, err := strconv.Atoi(strings.Fields(rest + " x")[0])
		if !ok || err != nil {
			b.Fatalf("the resident memory of %d: %q", pid, data)
		}
		sum += kib
	}
	return float64(sum) / 1024
}

// children are the processes below one whose command line has one of these texts, itself included.
func children(root int, texts ...string) (found []int) {
	parents, lines := map[int][]int{}, map[int]string{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, name := range stats {
		data, err := os.ReadFile(name)
		line, cerr := os.ReadFile(filepath.Join(filepath.Dir(name), "cmdline"))
		if err != nil || cerr != nil {
			continue // it has ended
		}
		text := string(data)
		pid, _ := strconv.Atoi(text[:strings.IndexByte(text, ' ')])
		parent, _ := strconv.Atoi(strings.Fields(text[strings.LastIndexByte(text, ')')+1:])[1])
		parents[parent], lines[pid] = append(parents[parent], pid), strings.ReplaceAll(string(line), "\x00", " ")
	}
	for next := []int{root}; len(next) > 0; next = next[1:] {
		if slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(lines[next[0]], text) }) {
			found = append(found, next[0])
		}
		next = append(next, parents[next[0]]...)
	}
	return found
}

// sides are the peer and ours, each with the image tool:1.
func sides(b *testing.B) []*side {
	b.Helper()
	testenv.RequireRoot(b)
	peer := harness.Docker(b)
	all := []*side{{name: "dockerd", socket: peer.Socket, pids: func() []int { return children(os.Getpid(), "dockerd --", "containerd --config") }}}
	ours := func(name string, user *syscall.Credential) {
		d := harness.Start(b, harness.Options{Args: []string{"--docker"}, User: user})
		all = append(all, &side{name: name, socket: filepath.Join(d.RuntimeDir, "docker.sock"), pids: func() []int {
			return children(d.PID(), "sandboxd serve", "sandboxd broker", "face docker", "launcher stage2")
		}})
	}
	ours("sandboxd", nil)
	if *uid != 0 {
		ours("sandboxd of an ordinary user", &syscall.Credential{Uid: uint32(*uid), Gid: uint32(*gid)})
	}
	image := harness.Tar(b, harness.Busybox(b)...)
	for _, s := range all {
		s.env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + b.TempDir(), "DOCKER_HOST=unix://" + s.socket}
		client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", s.socket)
		}}}
		b.Cleanup(client.CloseIdleConnections)
		harness.Eventually(b, func() error {
			resp, err := client.Get("http://docker/_ping")
			if err != nil {
				return err
			}
			return resp.Body.Close()
		})
		resp, err := client.Post("http://docker/images/create?fromSrc=-&repo=tool&tag=1", "application/x-tar", bytes.NewReader(image))
		if err != nil {
			b.Fatal(err)
		}
		said, err := io.ReadAll(resp.Body)
		if err = errors.Join(err, resp.Body.Close()); err != nil || !bytes.Contains(said, []byte("sha256:")) {
			b.Fatalf("import of the image: %s %s, %v", resp.Status, said, err)
		}
	}
	return all
}

// turns measures the sides n times each, and writes their row.
func turns(b *testing.B, sides []*side, n int, what string, goal string, measure func(s *side) time.Duration) {
	b.Helper()
	took := make(map[*side][]time.Duration)
	for i := range n {
		for j := range sides {
			s := sides[(i+j)%len(sides)]
			took[s] = append(took[s], measure(s))
		}
	}
	base := quantile(took[sides[0]], 50)
	for _, s := range sides {
		p50, p99 := quantile(took[s], 50), quantile(took[s], 99)
		line := fmt.Sprintf("| %s | %s | %d | %.1f | %.1f |", what, s.name, n, p50, p99)
		if s != sides[0] {
			line += fmt.Sprintf(" %.2f× | %s |", p50/base, goal)
		} else {
			line += " | |"
		}
		row(b, line)
	}
}

// quantile is in ms.
func quantile(took []time.Duration, percent int) float64 {
	sorted := slices.Sorted(slices.Values(took))
	return float64(sorted[min(len(sorted)-1, len(sorted)*percent/100)].Microseconds()) / 1000
}

func row(b *testing.B, line string) {
	b.Helper()
	fmt.Println(line)
	if *rows == "" {
		return
	}
	f, err := os.OpenFile(*rows, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		b.Fatal(err)
	}
	if _, err := fmt.Fprintln(f, line); err != nil {
		b.Fatal(err)
	}
	if err := f.Close(); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkDocker runs once, whatever b.N is.
func BenchmarkDocker(b *testing.B) {
	all := sides(b)
	docker := filepath.Join(harness.Unpacked(b), "usr", "bin", "docker")
	timed := func(s *side, argv ...string) time.Duration {
		began := time.Now()
		s.run(b, argv...)
		return time.Since(began)
	}

	turns(b, all[:1], *rounds, "the client alone: `docker --version`", "", func(s *side) time.Duration { return timed(s, docker, "--version") })
	turns(b, all, *rounds, "`docker run --rm IMAGE true`", "≤ 0.25×", func(s *side) time.Duration { return timed(s, docker, "run", "--rm", "tool:1", "true") })

	for _, s := range all {
		s.run(b, docker, "run", "-d", "--name", "work", "tool:1", "sleep", "100000")
	}
	turns(b, all, *rounds, "`docker exec CONTAINER true`", "≤ 0.3×", func(s *side) time.Duration { return timed(s, docker, "exec", "work", "true") })

	lib := filepath.Join(harness.Unpacked(b), "usr/lib/python3/dist-packages")
	script, err := filepath.Abs("testdata/execs.py")
	if err != nil {
		b.Fatal(err)
	}
	turns(b, all, max(1, *rounds/4), "64 execs of `echo` on 16 threads, docker-py", "≤ 0.25×", func(s *side) time.Duration {
		seconds, err := strconv.ParseFloat(s.run(b, "/usr/bin/env", "PYTHONDONTWRITEBYTECODE=1", "PYTHONPATH="+lib, "/usr/bin/python3", script, "work"), 64)
		if err != nil {
			b.Fatal(err)
		}
		return time.Duration(seconds * float64(time.Second))
	})

	turns(b, all, 3, "`docker stop` of `sleep infinity`", "≤ 100 ms", func(s *side) time.Duration {
		id := s.run(b, docker, "run", "-d", "tool:1", "sleep", "infinity")
		defer s.run(b, docker, "rm", id)
		return timed(s, docker, "stop", id)
	})

	for _, s := range all {
		before := s.resident(b)
		for range 99 {
			s.run(b, docker, "run", "-d", "tool:1", "sleep", "100000")
		}
		if len(s.pids()) < 2 {
			b.Fatalf("%s: only %v serve", s.name, s.pids())
		}
		row(b, fmt.Sprintf("| resident memory of all that serves, with 1 container and with 100 | %s | | %.0f MiB | %.0f MiB | | ≤ 100 MiB |", s.name, before, s.resident(b)))
		s.run(b, "/bin/sh", "-c", `"$0" rm -f $("$0" ps -aq)`, docker)
	}
}
