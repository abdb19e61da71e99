// Command table turns the measurements of `make bench-image` into the section "Images" of
// docs/performance.md. It reads them from standard input and the page from the file that is its
// argument, and writes the new page. The text after the figures, from "### Where the time goes" on,
// was written by hand and stays.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	goruntime "runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The beginning of the section, and of the text that was written by hand.
const (
	heading = "## Images\n"
	byHand  = "### Where the time goes\n"
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

// measurement is a record of the benchmark.
type measurement struct {
	What, Side string
	Round      int
	Wall       float64 `json:"wall_s"`
	CPU        float64 `json:"cpu_s"`
	Peak       float64 `json:"peak_mb"`
	Load       float64
}

type measurements []measurement

// of are those of one side.
func (all measurements) of(what, side string) (some measurements) {
	for _, m := range all {
		if m.What == what && m.Side == side {
			some = append(some, m)
		}
	}
	return some
}

func (all measurements) sorted(field func(measurement) float64) []float64 {
	var values []float64
	for _, m := range all {
		values = append(values, field(m))
	}
	slices.Sort(values)
	return values
}

func wall(m measurement) float64 { return m.Wall }
func cpu(m measurement) float64  { return m.CPU }
func peak(m measurement) float64 { return m.Peak }

func quantile(sorted []float64, percent int) float64 {
	if percent == 50 {
		return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
	}
	return sorted[max((len(sorted)*percent+99)/100, 1)-1]
}

func run(page string, r io.Reader, w io.Writer) error {
	all, processor, err := read(r)
	if err != nil {
		return err
	}
	if len(all) == 0 {
		return errors.New("no measurements on standard input")
	}
	old, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	before, section, _ := bytes.Cut(old, []byte(heading))
	fmt.Fprintf(w, "%s\n\n%s\n", bytes.TrimRight(before, "\n"), heading)
	if err := figures(w, all, processor); err != nil {
		return err
	}
	if _, words, ok := bytes.Cut(section, []byte(byHand)); ok {
		fmt.Fprintf(w, "\n%s%s", byHand, words)
	}
	return nil
}

func read(r io.Reader) (all measurements, processor string, err error) {
	processor = "unknown"
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		if name, ok := strings.CutPrefix(lines.Text(), "cpu: "); ok {
			processor = name
		}
		// The test binary may have begun the line.
		at := strings.Index(lines.Text(), `{"what"`)
		if at < 0 {
			continue
		}
		var m measurement
		if err := json.Unmarshal(lines.Bytes()[at:], &m); err != nil {
			return nil, "", fmt.Errorf("read %q: %w", lines.Text(), err)
		}
		all = append(all, m)
	}
	return all, processor, lines.Err()
}

const (
	us     = "sandboxd"
	podman = "podman"
	umoci  = "skopeo+umoci"
)

func figures(w io.Writer, all measurements, processor string) error {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return fmt.Errorf("uname: %w", err)
	}
	loads := all.sorted(func(m measurement) float64 { return m.Load })
	fmt.Fprintf(w, `Written by `+"`make bench-image`"+` on %s, on a machine with %d processors (%s), Linux %s, %s, on which the load
was %.0f to %.0f meanwhile. All sides are rootless and pull from one docker-registry on the same machine, into the same
file system, in turns; skopeo with umoci, which is far behind, in the first round only. Podman stores in native
overlay. A pull by sandboxd ends when everything is on disk; the peers leave that to the kernel. Processor time is that
of all processes of a side, without the kernel's own threads. Peak memory is for sandboxd the daemon, its launcher,
what unpacks, and the command line together; for the peers, their largest process.

| image | side | rounds | wall s: median (least–most) | processor s: median | peak MB: most |
|---|---|---:|---:|---:|---:|
`, time.Now().UTC().Format(time.DateOnly), goruntime.NumCPU(), processor, unix.ByteSliceToString(uts.Release[:]), goruntime.Version(), loads[0], loads[len(loads)-1])
	titles := []struct{ what, title string }{
		{"big", "python3, numpy, nodejs, npm: two layers"},
		{"forty", "the same files in forty layers"},
		{"second", "the same with the four highest layers changed, the first being there"},
	}
	for _, t := range titles {
		for _, side := range []string{us, podman, umoci} {
			some := all.of(t.what, side)
			if len(some) == 0 {
				continue
			}
			walls, peaks := some.sorted(wall), some.sorted(peak)
			fmt.Fprintf(w, "| %s | %s | %d | %.2f (%.2f–%.2f) | %.2f | %.0f |\n", t.title, side, len(some), quantile(walls, 50), walls[0], walls[len(walls)-1],
				quantile(some.sorted(cpu), 50), peaks[len(peaks)-1])
		}
	}
	fmt.Fprintln(w)
	for _, t := range titles {
		mine := all.of(t.what, us)
		peers := slices.DeleteFunc([]string{podman, umoci}, func(side string) bool { return len(all.of(t.what, side)) == 0 })
		if len(mine) == 0 || len(peers) == 0 {
			continue
		}
		faster := slices.MinFunc(peers, func(a, b string) int {
			return cmp.Compare(quantile(all.of(t.what, a).sorted(wall), 50), quantile(all.of(t.what, b).sorted(wall), 50))
		})
		fmt.Fprintf(w, "- %s: %.2f times the wall time of %s, the faster peer, and %.2f times its processor time (medians of the rounds' ratios).\n",
			t.title, ratio(mine, all.of(t.what, faster), wall), faster, ratio(mine, all.of(t.what, faster), cpu))
	}
	if second, first := all.of("second", us), all.of("forty", us); len(second) > 0 && len(first) > 0 {
		fmt.Fprintf(w, "- An image that shares nine tenths of its layers takes %.2f times what the first took (wall; %.2f times its processor time).\n",
			quantile(second.sorted(wall), 50)/quantile(first.sorted(wall), 50), quantile(second.sorted(cpu), 50)/quantile(first.sorted(cpu), 50))
	}
	runs(w, all)
	return nil
}

// ratio compares round by round, as both sides of a round had equal load.
func ratio(a, b measurements, field func(measurement) float64) float64 {
	var ratios []float64
	for _, m := range a {
		for _, other := range b {
			if m.Round == other.Round {
				ratios = append(ratios, field(m)/field(other))
			}
		}
	}
	if len(ratios) == 0 {
		return 0
	}
	slices.Sort(ratios)
	return quantile(ratios, 50)
}

func runs(w io.Writer, all measurements) {
	tiny := all.of("run", "tiny")
	if len(tiny) == 0 {
		return
	}
	fmt.Fprint(w, "\nA sandbox of an image that is there, from the request to the end of its first program:\n\n| image | p50 ms | p99 ms | times the tiny one |\n|---|---:|---:|---:|\n")
	for _, t := range []struct{ side, title string }{
		{"tiny", "busybox, one layer"}, {"big", "the large image of two layers"}, {"forty", "the same in forty layers"},
	} {
		some := all.of("run", t.side)
		if len(some) == 0 {
			continue
		}
		walls := some.sorted(wall)
		fmt.Fprintf(w, "| %s | %.1f | %.1f | %.2f |\n", t.title, 1000*quantile(walls, 50), 1000*quantile(walls, 99), ratio(some, tiny, wall))
	}
}
