// Package networks measures the networks of sandboxes against a plain veth, slirp4netns and pasta.
// `make bench-net` makes the namespaces, runs it in them and writes the page of its figures.
//
// The sides take turns, and the first one changes from round to round: a loaded machine slows all
// of them.
package networks

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

var (
	rounds    = flag.Int("rounds", 5, "rounds of bulk transfers and of requests")
	period    = flag.Duration("period", time.Second, "time of one bulk transfer")
	requests  = flag.Int("requests", 200, "requests of a side in a round")
	creations = flag.Int("creations", 100, "creations of each kind")
	idle      = flag.Int("idle", 36, "sandboxes of each kind in a round whose memory is added up")
	many      = flag.Int("many", 1000, "sandboxes with networks at once")
)

// A Sample is a line of the output.
type Sample struct {
	What   string    `json:"what"`
	Side   string    `json:"side"`
	Round  int       `json:"round"`
	Values []float64 `json:"values"`
	Load   float64   `json:"load"` // of the machine, the minute before
	Note   string    `json:"note,omitempty"`
}

// record writes a line of JSON, which the table is made of.
func record(b *testing.B, s Sample) {
	b.Helper()
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		b.Fatal(err)
	}
	if _, err := fmt.Sscan(string(load), &s.Load); err != nil {
		b.Fatal(err)
	}
	line, err := json.Marshal(s)
	if err != nil {
		b.Fatal(err)
	}
	fmt.Println(string(line))
}

// world returns the directory of hack/bench-net.sh.
func world(b *testing.B) string {
	b.Helper()
	dir := os.Getenv("SANDBOXD_BENCH_NET")
	if dir == "" {
		b.Skip("SANDBOXD_BENCH_NET names no directory: `make bench-net` makes namespaces and runs this in them")
	}
	testenv.RequireRoot(b)
	testenv.RequireUserNS(b)
	return dir
}

// policy allows the server by its name.
const policy = "version: 1\nrules:\n- allow: bench.test\n  ports: [80, 5001]\n"

// daemon starts a daemon of the ordinary user.
func daemon(b *testing.B) *harness.Daemon {
	b.Helper()
	return harness.Start(b, harness.Options{User: ordinary(b)})
}

var withNetwork = api.Network{Mode: api.NetworkEgress, Policy: policy}

// BenchmarkBulk measures throughput, and the processor time for it.
func BenchmarkBulk(b *testing.B) {
	dir := world(b)
	all := sides(b, dir)
	for _, t := range []struct {
		what string
		args []string
	}{
		{"up-1", nil}, {"up-8", []string{"-flows", "8"}}, {"down-1", []string{"-down"}}, {"down-8", []string{"-down", "-flows", "8"}},
	} {
		turns(all, *rounds, func(round int, s *side) {
			before := s.spent(b, dir)
			out, err := s.run(append([]string{"bulk", "-port", "5001", "-for", period.String()}, t.args...)...)
			if err != nil && s.name != "sandboxd" { // a peer's own fault
				fmt.Printf("peer %s failed at %s: %v\n", s.name, t.what, err)
				return
			} else if err != nil {
				b.Fatal(err)
			}
			spent := s.spent(b, dir) - before
			var r struct {
				Bytes        int64
				Elapsed, CPU time.Duration
			}
			decode(b, out, &r)
			gigabytes := float64(r.Bytes) / 1e9
			record(b, Sample{What: t.what, Side: s.name, Round: round, Values: []float64{gigabytes / r.Elapsed.Seconds(), (spent + r.CPU).Seconds() / gigabytes}})
		})
	}
}

// BenchmarkRequest measures a connection with one HTTP request, from connect to the end, and the
// processor time for it outside the client: of the server, of what relays, but not of the daemon.
func BenchmarkRequest(b *testing.B) {
	dir := world(b)
	all := sides(b, dir)
	turns(all, *rounds, func(round int, s *side) {
		before := s.spent(b, dir)
		var times []time.Duration
		decode(b, s.load(b, "requests", "-n", fmt.Sprint(*requests)), &times)
		spent := s.spent(b, dir) - before
		record(b, Sample{What: "request", Side: s.name, Round: round, Values: microseconds(times)})
		record(b, Sample{What: "request-cpu", Side: s.name, Round: round, Values: microseconds([]time.Duration{spent / time.Duration(*requests)})})
	})
}

// BenchmarkInspect measures requests in TLS, relayed unread and inspected: the first one of a
// connection, from connect to the response, and further ones.
func BenchmarkInspect(b *testing.B) {
	world(b)
	d := daemon(b)
	var all []*side
	for _, name := range []string{"unread", "inspected"} {
		rules := fmt.Sprintf("version: 1\nrules:\n- allow: bench.test\n  ports: 443\n  inspect: %t\n", name == "inspected")
		box := d.Create(b, api.CreateSandbox{Network: api.Network{Mode: api.NetworkEgress, Policy: rules}, Timeout: 86400, IdleTimeout: 86400})
		run := inSandbox(b, box)
		all = append(all, &side{name: name, run: func(args ...string) ([]byte, error) { return run(args...), nil }})
	}
	const connections = 50
	turns(all, 1+*rounds, func(round int, s *side) {
		var r struct{ First, Further []time.Duration }
		decode(b, s.load(b, "tls", "-port", "443", "-n", fmt.Sprint(connections)), &r)
		if round > 0 { // caches
			record(b, Sample{What: "tls-first", Side: s.name, Round: round, Values: microseconds(r.First)})
			record(b, Sample{What: "tls-further", Side: s.name, Round: round, Values: microseconds(r.Further)})
		}
	})
}

func microseconds(times []time.Duration) []float64 {
	var all []float64
	for _, t := range times {
		all = append(all, float64(t.Nanoseconds())/1000)
	}
	return all
}

func decode(b *testing.B, data []byte, v any) {
	b.Helper()
	if err := json.Unmarshal(bytes.TrimSpace(data), v); err != nil {
		b.Fatalf("read %q: %v", data, err)
	}
}

// turns calls f for each side in each round.
func turns(all []*side, rounds int, f func(round int, s *side)) {
	for round := range rounds {
		for i := range all {
			f(round, all[(round+i)%len(all)])
		}
	}
}

// settle is the pause after a deletion. The launcher makes the next namespace ahead meanwhile, as
// in all use but a creation right after another.
const settle = 20 * time.Millisecond

// BenchmarkCreate measures the creation of a sandbox with and without a network.
func BenchmarkCreate(b *testing.B) {
	world(b)
	d := daemon(b)
	for _, t := range []struct {
		what  string
		pause time.Duration
	}{{"create", settle}, {"create-again", 0}} {
		kinds := []*side{{name: "none"}, {name: "egress", network: withNetwork}}
		times := map[string][]time.Duration{}
		const warmUp = 5
		turns(kinds, warmUp+*creations, func(round int, s *side) {
			begin := time.Now()
			box := d.Create(b, api.CreateSandbox{Network: s.network})
			took := time.Since(begin)
			if err := box.TryDelete(b.Context()); err != nil {
				b.Fatal(err)
			}
			if round >= warmUp {
				times[s.name] = append(times[s.name], took)
			}
			time.Sleep(t.pause)
		})
		for _, s := range kinds {
			record(b, Sample{What: t.what, Side: s.name, Values: microseconds(times[s.name])})
		}
	}
}

// BenchmarkIdleMemory measures what the host's memory has less for sandboxes with and without
// networks: of all processes (proportional set sizes), and the kernel's own objects.
func BenchmarkIdleMemory(b *testing.B) {
	world(b)
	for round := range memoryRounds {
		b.Run(fmt.Sprint(round), func(b *testing.B) {
			d := daemon(b)
			kinds := []*side{{name: "none"}, {name: "egress", network: withNetwork}}
			hold := func(s *side) {
				d.Create(b, api.CreateSandbox{Network: s.network, Timeout: 86400, IdleTimeout: 86400})
			}
			for _, s := range kinds {
				hold(s) // what the first one takes
			}
			if round%2 > 0 {
				slices.Reverse(kinds)
			}
			turns(kinds, 1, func(_ int, s *side) {
				before := [2]int64{processMemory(b), kernelMemory(b)}
				for range *idle {
					hold(s)
				}
				time.Sleep(time.Second) // until the kernel has freed what it no longer uses
				after := [2]int64{processMemory(b), kernelMemory(b)}
				each := func(i int) float64 { return float64(after[i]-before[i]) / float64(*idle) / 1024 }
				record(b, Sample{What: "idle", Side: s.name, Round: round, Values: []float64{each(0), each(1)}})
			})
		})
	}
}

// memoryRounds is the number of daemons whose sandboxes' memory is measured.
const memoryRounds = 4

// BenchmarkMany makes sandboxes with networks until there are enough, or until one cannot be made.
func BenchmarkMany(b *testing.B) {
	world(b)
	d := daemon(b)
	begin := time.Now()
	var last *harness.Sandbox
	s := Sample{What: "many", Side: "user"}
	made := 0
	for ; made < *many; made++ {
		box, err := d.TryCreate(b.Context(), api.CreateSandbox{Network: withNetwork, Timeout: 86400, IdleTimeout: 86400})
		if err != nil {
			s.Note = err.Error()
			break
		}
		last = box
	}
	s.Values = []float64{float64(made), time.Since(begin).Seconds()}
	if made > 0 { // the last one's works
		decode(b, inSandbox(b, last)("requests", "-n", "1"), new([]time.Duration))
	}
	record(b, s)
}

// inSandbox puts the load program into a sandbox and returns a function that runs it.
func inSandbox(b *testing.B, box *harness.Sandbox) func(args ...string) []byte {
	b.Helper()
	program, err := os.ReadFile(filepath.Join(os.Getenv("SANDBOXD_BENCH_NET"), "load"))
	if err != nil {
		b.Fatal(err)
	}
	if err := box.Put(b.Context(), "/tmp/load", program); err != nil {
		b.Fatal(err)
	}
	box.Sh(b, "chmod 755 /tmp/load")
	return func(args ...string) []byte {
		ctx, cancel := context.WithTimeout(b.Context(), testenv.HungAfter)
		defer cancel()
		r, err := box.TryExec(ctx, api.ExecRequest{Argv: append([]string{"/tmp/load"}, args...)})
		if err != nil {
			b.Fatal(err)
		}
		if r.Exit.Code != 0 {
			b.Fatalf("load %q in a sandbox: %s", args, r.Stderr)
		}
		return []byte(r.Stdout)
	}
}
