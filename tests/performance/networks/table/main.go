// Command table turns the measurements of `make bench-net` into the section "Networks" of
// docs/performance.md. It reads them from standard input and the page from the file that is its
// argument, and writes the new page. The text after the figures, from "### Where the time of
// networks goes" on, was written by hand and stays.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The beginnings of the section, of its text that was written by hand, and of the next section.
const (
	heading = "## Networks\n"
	byHand  = "### Where the time of networks goes\n"
	next    = "\n## "
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: table PAGE")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "table:", err)
		os.Exit(1)
	}
}

func run(page string, r io.Reader, w io.Writer) error {
	m, err := read(r)
	if err != nil {
		return err
	}
	if len(m.samples) == 0 {
		return errors.New("no measurements on standard input")
	}
	old, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	before, section, _ := bytes.Cut(old, []byte(heading))
	section, after, more := bytes.Cut(section, []byte(next))
	fmt.Fprintf(w, "%s\n\n%s\n", bytes.TrimRight(before, "\n"), heading)
	if err := m.figures(w); err != nil {
		return err
	}
	if _, words, ok := bytes.Cut(section, []byte(byHand)); ok {
		fmt.Fprintf(w, "\n%s%s\n", byHand, bytes.TrimRight(words, "\n"))
	}
	if more {
		fmt.Fprintf(w, "%s%s", next, after)
	}
	return nil
}

// sample is a line of the benchmark.
type sample struct {
	What, Side string
	Round      int
	Values     []float64
	Load       float64
	Note       string
}

// measurements are all of one run.
type measurements struct {
	samples   []sample
	make      map[string][]float64 // metrics of netns.BenchmarkMake
	absent    map[string]int       // what peers cannot do here, and how often
	processor string
}

func read(r io.Reader) (*measurements, error) {
	m := &measurements{make: make(map[string][]float64), absent: make(map[string]int), processor: "unknown"}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		if name, ok := strings.CutPrefix(line, "cpu: "); ok {
			m.processor = name
		}
		if said, ok := strings.CutPrefix(line, "peer "); ok {
			if what, _, failed := strings.Cut(said, ": load: "); failed { // with a port
				said = what
			}
			m.absent[said]++
			continue
		}
		if strings.HasPrefix(line, "BenchmarkMake/full/1") {
			f := strings.Fields(line)
			for i := 2; i+1 < len(f); i += 2 {
				v, err := strconv.ParseFloat(f[i], 64)
				if err != nil {
					return nil, fmt.Errorf("read %q: %w", line, err)
				}
				m.make[f[i+1]] = append(m.make[f[i+1]], v)
			}
		}
		at := strings.Index(line, `{"what"`) // the test binary may have begun the line
		if at < 0 {
			continue
		}
		var s sample
		if err := json.Unmarshal([]byte(line[at:]), &s); err != nil {
			return nil, fmt.Errorf("read %q: %w", line, err)
		}
		m.samples = append(m.samples, s)
	}
	return m, lines.Err()
}

// of returns value i of each round, sorted; for i < 0 all values of all rounds.
func (m *measurements) of(what, side string, i int) (values []float64) {
	for _, s := range m.samples {
		switch {
		case s.What != what || s.Side != side:
		case i < 0:
			values = append(values, s.Values...)
		case i < len(s.Values):
			values = append(values, s.Values[i])
		}
	}
	slices.Sort(values)
	return values
}

func quantile(sorted []float64, percent int) float64 {
	if len(sorted) == 0 {
		return 0
	}
	if percent == 50 {
		return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
	}
	return sorted[max((len(sorted)*percent+99)/100, 1)-1]
}

func median(values []float64) float64 { return quantile(values, 50) }

const (
	us   = "sandboxd"
	veth = "veth"
)

var sides = []struct{ name, title string }{
	{us, "sandboxd, through a policy"}, {veth, "veth, routed, no policy"}, {"slirp4netns", "slirp4netns"}, {"pasta", "pasta"},
}

var bulks = []string{"up-1", "up-8", "down-1", "down-8"}

func (m *measurements) figures(w io.Writer) error {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return fmt.Errorf("uname: %w", err)
	}
	loads := make([]float64, 0, len(m.samples))
	for _, s := range m.samples {
		loads = append(loads, s.Load)
	}
	congestion, err := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control")
	if err != nil {
		return err
	}
	fmt.Fprintf(w, `Written by `+"`make bench-net`"+` on %s, on a machine with %d processors (%s), Linux %s, %s, TCP with %s, on which the load
was %.0f to %.0f meanwhile. The server is in a namespace of its own, behind a veth with MTU 1500, which all sides share; sandboxes, slirp4netns and pasta are an ordinary user's.
The sides take turns. Processor time is that of both ends, of the process that relays, and of the kernel's threads for interrupts.

| TCP, median of %d rounds | up, 1 flow, GB/s | 8 flows | down, 1 flow | 8 flows | processor s per GB: up, 1 | 8 | down, 1 | 8 |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
`, time.Now().UTC().Format(time.DateOnly), goruntime.NumCPU(), m.processor, unix.ByteSliceToString(uts.Release[:]), goruntime.Version(), strings.TrimSpace(string(congestion)),
		slices.Min(loads), slices.Max(loads), len(m.of("up-1", us, 0)))
	for _, s := range sides {
		if len(m.of("up-1", s.name, 0)) == 0 {
			continue
		}
		fmt.Fprintf(w, "| %s", s.title)
		for i := range 2 {
			for _, what := range bulks {
				if v := m.of(what, s.name, i); len(v) > 0 {
					fmt.Fprintf(w, " | %.2f", median(v))
				} else {
					fmt.Fprint(w, " | –")
				}
			}
		}
		fmt.Fprintln(w, " |")
	}
	m.times(w)
	m.judge(w)
	return nil
}

func (m *measurements) times(w io.Writer) {
	fmt.Fprint(w, "\n| what | count | p50 ms | p99 ms |\n|---|---:|---:|---:|\n")
	row := func(title, what, side string) { // microseconds, shown as milliseconds
		if v := m.of(what, side, -1); len(v) > 0 {
			fmt.Fprintf(w, "| %s | %d | %.2f | %.2f |\n", title, len(v), quantile(v, 50)/1000, quantile(v, 99)/1000)
		}
	}
	for _, s := range sides {
		row("connect, HTTP request, response, close: "+s.title, "request", s.name)
	}
	row("the same in TLS, first request of a connection, relayed unread", "tls-first", "unread")
	row("– inspected", "tls-first", "inspected")
	row("a further request of it, relayed unread", "tls-further", "unread")
	row("– inspected", "tls-further", "inspected")
	row("creation of a sandbox, `--network none`", "create", "none")
	row("creation of a sandbox, `--network egress:POLICY`", "create", "egress")
	row("the same with no pause after a deletion, none", "create-again", "none")
	row("the same with no pause after a deletion, egress", "create-again", "egress")
}

// judge compares with the goals.
func (m *measurements) judge(w io.Writer) {
	fmt.Fprint(w, "\n| what (medians) | measured | goal | |\n|---|---:|---:|---|\n")
	goal := func(what string, measured, bound float64, least bool, unit string) {
		sign, held := "≤", measured <= bound
		if least {
			sign, held = "≥", measured >= bound
		}
		verdict := "held"
		if !held {
			verdict = "**missed**"
		}
		fmt.Fprintf(w, "| %s | %.4g%s | %s %.4g%s | %s |\n", what, measured, unit, sign, bound, unit, verdict)
	}
	titles := map[string]string{"up-1": "up, 1 flow", "up-8": "up, 8 flows", "down-1": "down, 1 flow", "down-8": "down, 8 flows"}
	for _, peer := range []struct {
		name  string
		bound float64
	}{{"slirp4netns", 3}, {"pasta", 1.2}, {veth, 0.6}} {
		for _, what := range bulks {
			if theirs := median(m.of(what, peer.name, 0)); theirs > 0 {
				goal(fmt.Sprintf("throughput to %s, %s", peer.name, titles[what]), median(m.of(what, us, 0))/theirs, peer.bound, true, "×")
			}
		}
	}
	for _, what := range bulks {
		if theirs := median(m.of(what, veth, 1)); theirs > 0 {
			goal("processor time for a byte to veth, "+titles[what], median(m.of(what, us, 1))/theirs, 1.9, false, "×")
		}
	}
	if theirs := median(m.of("request", veth, -1)); theirs > 0 {
		ours := median(m.of("request", us, -1))
		goal("connect, request, close", ours, 600, false, " µs")
		goal("the same, to veth (600 µs where veth takes 190)", ours/theirs, 600./190, false, "×")
	}
	for _, g := range []struct {
		what, title string
		bound       float64
	}{{"tls-first", "added by inspection to a first request", 1000}, {"tls-further", "added by inspection to a further request", 200}} {
		if unread := median(m.of(g.what, "unread", -1)); unread > 0 {
			goal(g.title, median(m.of(g.what, "inspected", -1))-unread, g.bound, false, " µs")
		}
	}
	if none := median(m.of("create", "none", -1)); none > 0 {
		goal("creation with a network, to one without", median(m.of("create", "egress", -1))/none, 1.15, false, "×")
	}
	if none := m.of("idle", "none", 0); len(none) > 0 {
		processes := median(m.of("idle", "egress", 0)) - median(none)
		kernel := median(m.of("idle", "egress", 1)) - median(m.of("idle", "none", 1))
		goal(fmt.Sprintf("memory of an idle network: %.0f KiB of processes, %.0f of the kernel's", processes, kernel), processes+kernel, 300, false, " KiB")
	}
	if made := m.of("many", "user", 0); len(made) > 0 {
		goal("sandboxes with networks at once", median(made), 1000, true, "")
	}
	if each := median(m.make["µs/make"]); each > 0 {
		goal("100 namespaces made, as the refill does, and removed", each*100/1e6+median(m.make["ms/free-100"])/1e3, 0.5, false, " s")
	}
	for _, s := range m.samples {
		if s.Note != "" {
			fmt.Fprintf(w, "\n- %s: stopped at %.0f: %s\n", s.What, s.Values[0], s.Note)
		}
	}
	for _, said := range slices.Sorted(maps.Keys(m.absent)) {
		fmt.Fprintf(w, "\n- Peer %s (%d times)\n", said, m.absent[said])
	}
}
