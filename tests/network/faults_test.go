package network

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
	"github.com/sandboxd/sandboxd/tests/network/op"
)

// working are clients that show that a network works: names, HTTP, TLS, both families, raw bytes.
var working = []op.Op{
	{Kind: op.Client, Name: "http-GET"},
	{Kind: op.Client, Name: "https-POST"},
	{Kind: op.Client, Name: "https-ipv6-GET"},
	{Kind: op.Client, Name: "raw-half-close-lan"},
	{Kind: op.Client, Name: "http2"},
	{Kind: op.Client, Name: "https-websocket"},
}

// wantWorking has the clients work in a sandbox.
func wantWorking(t *testing.T, s *harness.Sandbox) {
	t.Helper()
	for i, r := range probe(t, s, working) {
		if r.Error != "" {
			t.Errorf("%s: %s", working[i].Name, r.Error)
		}
	}
}

// gateways are the processes of a daemon's gateway.
func gateways(t *testing.T, d *harness.Daemon) (pids []int) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	parent := make(map[int]int)
	var named []int
	for _, file := range all {
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			t.Fatal(err)
		}
		stat, err := os.ReadFile(filepath.Join(filepath.Dir(file), "stat"))
		if err != nil {
			continue // it has ended
		}
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		parent[pid], _ = strconv.Atoi(fields[1]) // the kernel's numbers
		args, err := os.ReadFile(file)
		if argv := strings.Split(string(args), "\x00"); err == nil && fields[0] != "Z" && len(argv) > 1 && argv[1] == "gateway" {
			named = append(named, pid)
		}
	}
	for _, pid := range named {
		for p := pid; p > 1; p = parent[p] {
			if p == d.PID() {
				pids = append(pids, pid)
				break
			}
		}
	}
	return pids
}

// killGateway ends the gateway as a crash would. It returns false if there is none just now.
func killGateway(t *testing.T, d *harness.Daemon) bool {
	t.Helper()
	killed := false
	for _, pid := range gateways(t, d) {
		if err := unix.Kill(pid, unix.SIGKILL); err == nil {
			killed = true
		} else if !errors.Is(err, unix.ESRCH) {
			t.Fatalf("kill the gateway: %v", err)
		}
	}
	return killed
}

const (
	holdAt = "10.1.0.8:9000"
	mark   = "held"
)

// holding serves connections that stay open. It returns a channel with a value for each that has
// sent its first bytes.
func holding(t *testing.T, w *world) <-chan struct{} {
	t.Helper()
	came := make(chan struct{}, 10*op.AtOnce)
	w.serve(t, holdAt, func(c net.Conn) {
		if _, err := io.ReadFull(c, make([]byte, len(mark))); err == nil {
			came <- struct{}{}
		}
		_, _ = io.Copy(io.Discard, c) // until it ends
	})
	return came
}

// begin starts operations in a sandbox beside the test. Wait returns their results.
func begin(t *testing.T, s *harness.Sandbox, ops []op.Op) (wait func() []op.Result) {
	t.Helper()
	input, err := json.Marshal(ops)
	if err != nil {
		t.Fatal(err)
	}
	var got *api.ExecResult
	var execErr error
	done := make(chan struct{})
	go func() {
		defer close(done)
		got, execErr = s.TryExec(t.Context(), api.ExecRequest{Argv: []string{proberAt}, Stdin: input, OutputLimit: 16 << 20, Timeout: testenv.HungAfter.Seconds()})
	}()
	return func() []op.Result {
		t.Helper()
		<-done
		if execErr != nil || got.Exit.Code != 0 {
			t.Fatalf("the prober ended with %+v, %v", got, execErr)
		}
		return results(t, ops, []byte(got.Stdout))
	}
}

// A gateway that is killed resets its connections. Later ones work, and nothing in the sandbox has
// to be done for that.
func TestGatewayIsKilled(t *testing.T) {
	each(t, func(t *testing.T, w *world, d *harness.Daemon) {
		t.Helper()
		ca := site(t, w, nil)
		came := holding(t, w)
		s := trusting(t, d, "default", allowed, ca)
		for range 2 {
			wait := begin(t, s, append([]op.Op{{Kind: op.Hold, To: holdAt, Bytes: []byte(mark), Count: 10}}, working...))
			for range 10 {
				<-came
			}
			if !killGateway(t, d) {
				t.Fatal("there is no gateway to kill")
			}
			for i, r := range wait() {
				if r.Error != "" {
					t.Errorf("operation %d: %s", i, r.Error)
				}
			}
		}
		if flows := s.Flows(t); !slices.ContainsFunc(flows, func(f api.Flow) bool { return f.Kind == api.FlowRestart }) {
			t.Errorf("no restart is recorded: %+v", flows)
		}
	})
}

// However the gateway is killed while connections begin and end, the network works afterwards.
func TestGatewayIsKilledAtRandom(t *testing.T) {
	each(t, func(t *testing.T, w *world, d *harness.Daemon) {
		t.Helper()
		ca := site(t, w, nil)
		s := trusting(t, d, "default", allowed, ca)
		for range testenv.Rounds(3, 100) {
			var ops []op.Op
			for range 20 {
				ops = append(ops, op.Op{Kind: op.TCP, To: lanAddr + ":9000", Bytes: []byte("x"), HalfClose: true})
			}
			wait := begin(t, s, ops)
			killGateway(t, d)
			for i, r := range wait() {
				if complete := r.Error == "" && string(r.Read) == "x"; !complete && r.Error != "ECONNRESET" {
					t.Errorf("connection %d: %+v; want an echo or a reset", i, r)
				}
			}
			wantWorking(t, s)
		}
	})
}

// A daemon that is killed takes its gateway along. Its successor's serves the sandboxes that go on,
// whose programs wait meanwhile.
func TestDaemonIsKilled(t *testing.T) {
	w := internet(t)
	for _, who := range both {
		t.Run(who, func(t *testing.T) {
			ca := site(t, w, nil)
			came := holding(t, w)
			d := harness.Start(t, options(t, w, who))
			s := trusting(t, d, "default", allowed, ca)
			wantWorking(t, s)
			before := len(s.Flows(t))
			c := d.Client(t)
			input, err := json.Marshal(append([]op.Op{{Kind: op.Hold, To: holdAt, Bytes: []byte(mark), Count: 10}}, working...))
			if err != nil {
				t.Fatal(err)
			}
			x, err := c.Detach(t.Context(), s.ID, api.ExecRequest{Argv: []string{proberAt}, Stdin: input})
			if err != nil {
				t.Fatal(err)
			}
			for range 10 {
				<-came
			}
			d.Kill9(t)
			d.Launch(t)
			var out bytes.Buffer
			end, err := c.AttachStream(t.Context(), s.ID, x.ID, 0, func(e api.ExecEvent) error {
				out.WriteString(e.Text)
				return nil
			})
			if err != nil || end.Exit.Code != 0 {
				t.Fatalf("%+v, %v", end, err)
			}
			for i, r := range results(t, make([]op.Op, len(working)+1), out.Bytes()) {
				if r.Error != "" {
					t.Errorf("operation %d: %s", i, r.Error)
				}
			}
			if after := len(s.Flows(t)); after <= before {
				t.Errorf("%d flows after %d", after, before)
			}
		})
	}
}

// A sandbox that is deleted with many open connections leaves none of them, and no socket in the
// gateway.
func TestDeletedSandboxLeavesNothing(t *testing.T) {
	each(t, func(t *testing.T, w *world, d *harness.Daemon) {
		t.Helper()
		ca := site(t, w, nil)
		came := holding(t, w)
		neighbour := trusting(t, d, "default", allowed, ca)
		wantWorking(t, neighbour)
		sockets := func() int { // pipes are kept for later connections
			pids := gateways(t, d)
			if len(pids) != 1 {
				t.Fatalf("gateways: %v", pids)
			}
			files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pids[0]))
			if err != nil {
				t.Fatal(err)
			}
			n := 0
			for _, file := range files {
				if to, err := os.Readlink(file); err == nil && strings.HasPrefix(to, "socket:") {
					n++
				}
			}
			return n
		}
		settled(t, w)
		before := sockets()
		s := connected(t, d, "default", allowed)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			input, _ := json.Marshal([]op.Op{{Kind: op.Hold, To: holdAt, Bytes: []byte(mark), Count: op.AtOnce}}) // it is a plain value
			_, _ = s.TryExec(t.Context(), api.ExecRequest{Argv: []string{proberAt}, Stdin: input})                // it is ended
		}()
		for range op.AtOnce {
			<-came
		}
		if n := sockets(); n < before+op.AtOnce {
			t.Errorf("%d sockets with %d connections, %d before", n, op.AtOnce, before)
		}
		s.Delete(t)
		<-ended
		settled(t, w)
		harness.Eventually(t, func() error {
			if n := sockets(); n > before {
				return fmt.Errorf("the gateway has %d sockets, %d before", n, before)
			}
			return nil
		})
		wantWorking(t, neighbour)
	})
}

// Servers and resolvers that fail are told from refusals, and what works again is used again.
func TestUpstreamFails(t *testing.T) {
	with(t, alike(), func(t *testing.T, w *world, d *harness.Daemon) {
		t.Helper()
		ca := site(t, w, nil)
		var fails atomic.Bool
		fails.Store(true)
		w.names.set(map[string]*host{"later.site.test": {addrs: []string{siteAddr}, odd: func(_ *dnsmessage.Message, reply []byte) [][]byte {
			if fails.Load() {
				reply[3] = reply[3]&0xf0 | 2 // SERVFAIL
			}
			return [][]byte{reply}
		}}})
		s := trusting(t, d, "default", allowed, ca)
		first := probe(t, s, []op.Op{
			{Kind: op.Resolve, Name: "later.site.test"},
			{Kind: op.Resolve, Name: "none.site.test"},
			{Kind: op.TCP, Before: []string{"resets.site.test"}, To: "93.184.215.82:80", Bytes: get("resets.site.test", "/")},
			{Kind: op.TCP, To: "10.1.0.9:9000", Bytes: []byte("x"), HalfClose: true}, // a canary
		})
		fails.Store(false)
		again := probe(t, s, []op.Op{{Kind: op.Resolve, Name: "later.site.test"}})
		if first[0].Code != 2 || again[0].Code != 0 || !slices.Equal(again[0].Addresses, []string{siteAddr}) {
			t.Errorf("a resolver that fails once: %+v, then %+v", first[0], again[0])
		}
		if r := first[1]; r.Error != "" || len(r.Addresses) > 0 {
			t.Errorf("a name that does not exist: %+v", r)
		}
		if r, got := first[2], statuses(first[2].Read); r.Error != "ECONNRESET" && !slices.Equal(got, []int{http.StatusBadGateway}) {
			t.Errorf("a server that resets: %+v", r)
		}
		if r := first[3]; r.Error != "" || len(r.Read) > 0 {
			t.Errorf("a server that ends without an answer: %+v", r)
		}
		for _, f := range s.Flows(t) {
			if !f.Allow {
				t.Errorf("a failure is recorded as a refusal: %+v", f)
			}
		}
		wantWorking(t, s)
	})
}

// Many sandboxes use their networks at once.
func TestManySandboxes(t *testing.T) {
	const n = 30 // a gateway that may have 20,000 files serves 40
	each(t, func(t *testing.T, w *world, d *harness.Daemon) {
		t.Helper()
		ca := site(t, w, nil)
		program, err := os.ReadFile(harness.Helper(t, "prober"))
		if err != nil {
			t.Fatal(err)
		}
		input, err := json.Marshal(working)
		if err != nil {
			t.Fatal(err)
		}
		boxes, errs := make([]*harness.Sandbox, n), make([]error, n)
		var all sync.WaitGroup
		free := make(chan struct{}, 4)
		for i := range n {
			all.Go(func() {
				free <- struct{}{}
				defer func() { <-free }()
				errs[i] = func() (err error) {
					if boxes[i], err = d.TryCreate(t.Context(), api.CreateSandbox{Network: api.Network{Mode: api.NetworkEgress, Policy: allowed}}); err != nil {
						return err
					}
					t.Cleanup(func() { _ = boxes[i].TryDelete(context.WithoutCancel(t.Context())) }) // the daemon does it else
					return errors.Join(boxes[i].Put(t.Context(), op.CA, ca), boxes[i].Put(t.Context(), proberAt, program))
				}()
			})
		}
		all.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		for i, s := range boxes {
			all.Go(func() {
				got, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", "chmod 755 " + proberAt + "; exec " + proberAt}, Stdin: input})
				var results []op.Result
				if err == nil {
					results, err = readResults([]byte(got.Stdout))
				}
				for j, r := range results {
					if r.Error != "" {
						err = errors.Join(err, fmt.Errorf("%s: %s", working[j].Name, r.Error))
					}
				}
				errs[i] = err
			})
		}
		all.Wait()
		for i, err := range errs {
			if err != nil {
				t.Errorf("sandbox %d: %v", i, err)
			}
		}
	})
}

// A sandbox that takes all connections, descriptors and questions that it gets, and holds them with
// heads that it does not end, takes nothing from its neighbour.
func TestFloodsStopAtTheirSandbox(t *testing.T) {
	each(t, func(t *testing.T, w *world, d *harness.Daemon) {
		t.Helper()
		ca := site(t, w, nil)
		w.names.set(map[string]*host{"*.flood.site.test": {addrs: []string{siteAddr}}})
		const (
			unreadAt = "10.1.0.9:9000"
			enough   = 100 // connections
		)
		over := make(chan struct{})
		t.Cleanup(func() { close(over) })
		w.serve(t, unreadAt, func(net.Conn) { <-over }) // all bytes stay in buffers
		neighbour := trusting(t, d, "default", allowed, ca)
		for name, to := range map[string]struct{ addr, bytes string }{
			"slow heads":  {siteAddr + ":80", "GET / HTTP/1.1\r\nHost: site.test\r\nA: "},
			"connections": {lanAddr + ":9000", "x"},
			"refusals":    {evilAddr + ":4444", "x"},
			"unread":      {unreadAt, strings.Repeat("x", 1<<20)},
		} {
			t.Run(name, func(t *testing.T) {
				forget(t, w)
				flooding := connected(t, d, "default", allowed)
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					input, _ := json.Marshal([]op.Op{{Kind: op.Flood, To: to.addr, Bytes: []byte(to.bytes), Name: "flood.site.test"}}) // a plain value
					_, _ = flooding.TryExec(t.Context(), api.ExecRequest{Argv: []string{proberAt}, Stdin: input})                      // it is ended
				}()
				harness.Eventually(t, func() error {
					if w.count(netip.MustParseAddrPort(to.addr)) < enough &&
						!slices.ContainsFunc(flooding.Flows(t), func(f api.Flow) bool { return !f.Allow }) {
						return errors.New("there is no flood yet")
					}
					return nil
				})
				wantWorking(t, neighbour)
				for _, f := range neighbour.Flows(t) {
					if !f.Allow || f.Lost > 0 {
						t.Errorf("the neighbour notices: %+v", f)
					}
				}
				flooding.Delete(t)
				<-ended
				wantWorking(t, neighbour)
			})
		}
	})
}
