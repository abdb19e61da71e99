// Command table turns the output of the benchmarks into the page docs/performance.md.
package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "table:", err)
		os.Exit(1)
	}
}

// rows are the lines of the page: benchmark, side, and the side for comparison.
var rows = []struct{ bench, side, title string }{
	{"BenchmarkExecTrue", "sandbox", "exec of a static `true` in a running sandbox, over the socket"},
	{"BenchmarkExecTrue", "host", "the same: fork and exec on the host"},
	{"BenchmarkCreateRunDelete", "sandboxd", "create a sandbox of the host image → first byte of its program → delete"},
	{"BenchmarkCreateRunDelete", "create", "– of this, the creation"},
	{"BenchmarkCreateRunDelete", "exec", "– the program"},
	{"BenchmarkCreateRunDelete", "delete", "– the deletion"},
	{"BenchmarkCreateRunDelete", "first-byte", "– the creation and the program, to its first byte"},
	{"BenchmarkCreateRunDelete", "runc", "the same: `runc run` of an equal bundle, rootless"},
	{"BenchmarkCreateRunDelete", "crun", "the same: `crun run` of that bundle"},
	{"BenchmarkCreateRunDelete", "podman", "the same: `podman run --rm --rootfs`, with runc"},
	{"BenchmarkWarm", "sandboxd", "create, where one is parked (`serve --pool host=2`) → first byte → delete"},
	{"BenchmarkWarm", "create", "– of this, the creation"},
	{"BenchmarkWarm", "exec", "– the program"},
	{"BenchmarkWarm", "delete", "– the deletion"},
	{"BenchmarkWarm", "bwrap", "the same program by `bwrap --unshare-all --ro-bind …`"},
	{"BenchmarkManyLive", "create-1", "creation while 1 sandbox runs"},
	{"BenchmarkManyLive", "create-200", "creation while 200 run"},
	{"BenchmarkManyLive", "exec-1", "exec while 1 sandbox runs"},
	{"BenchmarkManyLive", "exec-200", "exec while 200 run"},
	{"BenchmarkSnapshot", "snapshot", "snapshot of a sandbox with 1,000 written files of 10 KB"},
	{"BenchmarkSnapshot", "host-and-removal", "1,000 such files written on the host by one program, synced and removed"},
	{"BenchmarkFork", "fork20", "20 forks of it"},
	{"BenchmarkWorkspace", "with", "creation with a workspace of 100,000 files"},
	{"BenchmarkWorkspace", "without", "the same without"},
	{"BenchmarkAgentRun", "run", "`agent run` of 11 turns with a model that answers at once: make, 10 × `bash -c true`, submit, collect, delete"},
	{"BenchmarkAgentRun", "turn", "– of this, a turn with its `bash -c true`"},
	{"BenchmarkAgentRun", "exec", "that exec alone, over the socket"},
	{"BenchmarkOutput", "sandbox", "100 MiB of output: `sandboxd exec SANDBOX cat FILE \\| wc -c`"},
	{"BenchmarkOutput", "host", "the same on the host: `cat FILE \\| wc -c`"},
	{"BenchmarkOutput", "frames", "the same to a Go client, in frames through the daemon"},
	{"BenchmarkOutput", "json", "the same to a Go client, as JSON lines"},
	{"BenchmarkDiskLimit", "limited", "100 MiB written in 100 files and removed, in a sandbox with `--disk 200m`"},
	{"BenchmarkDiskLimit", "free", "the same in one without"},
	{"BenchmarkHealth", "request", "one HTTP request over the socket that does nothing"},
}

// goals are the promises: a metric, divided by another one where there is a second, and the bound.
var goals = []struct {
	what         string
	bench        string
	metric, over string
	least        bool // the bound is a least, not a most
	bound        float64
	unit         string
}{
	{"exec of a static `true`, over HTTP on the socket, to fork and exec on the host", "BenchmarkExecTrue", "sandbox-p50-ms", "host-p50-ms", false, 1.5, "×"},
	{"100 MiB of output by `exec` without `-i`, to the host's pipe", "BenchmarkOutput", "sandbox-p50-ms", "host-p50-ms", false, 1.25, "×"},
	{"writing and removing 100 MiB under a disk limit, to none", "BenchmarkDiskLimit", "limited-p50-ms", "free-p50-ms", false, 1.11, "×"},
	{"warm create → first byte → delete answered, to bwrap", "BenchmarkWarm", "sandboxd-p50-ms", "bwrap-p50-ms", false, 1, "×"},
	{"cold create → first byte, to `runc run` of an equal bundle", "BenchmarkCreateRunDelete", "first-byte-p50-ms", "runc-p50-ms", false, 0.5, "×"},
	{"cold create while 200 run, to while 1 runs", "BenchmarkManyLive", "create-200-p50-ms", "create-1-p50-ms", false, 1.2, "×"},
	{"exec while 200 run, to while 1 runs", "BenchmarkManyLive", "exec-200-p50-ms", "exec-1-p50-ms", false, 1.2, "×"},
	{"memory of the host for an idle sandbox (PSS of all processes, over 100)", "BenchmarkIdleMemory", "per-sandbox-MiB", "", false, 5, " MiB"},
	{"create + exec + delete a second, cold, all processors busy", "BenchmarkThroughput", "whole-per-s", "", true, 60, ""},
	{"execs a second in running sandboxes, all processors busy", "BenchmarkThroughput", "exec-per-s", "", true, 400, ""},
	{"snapshot of a sandbox with 1,000 written files of 10 KB", "BenchmarkSnapshot", "snapshot-p50-ms", "", false, 30, " ms"},
	{"20 forks of it", "BenchmarkFork", "fork20-p50-ms", "", false, 600, " ms"},
	{"opening a workspace of 100,000 files, more than none", "BenchmarkWorkspace", "more-p50-ms", "", false, 50, " ms"},
	{"resident memory of the daemon with 200 sandboxes", "BenchmarkManyLive", "daemon-MiB", "", false, 60, " MiB"},
	{"its growth over 5,000 × create + exec + delete", "BenchmarkDaemonGrowth", "growth-percent", "", false, 5, " %"},
	{"the agent's turn with one command, less the exec", "BenchmarkAgentRun", "loop-p50-ms", "", false, 3, " ms"},
	{"an agent's run of 11 turns with a model that answers at once", "BenchmarkAgentRun", "run-p50-ms", "", false, 1000, " ms"},
	{"64 such runs that begin at once, until the last has ended", "BenchmarkAgentRunsAtOnce", "last-s", "", false, 64, " s"},
}

func run(r io.Reader, w io.Writer) error {
	values, absent, cpu, err := read(r)
	if err != nil {
		return err
	}
	if len(values) == 0 {
		return fmt.Errorf("no benchmark results on standard input")
	}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return fmt.Errorf("uname: %w", err)
	}
	who := "an ordinary user"
	if os.Geteuid() == 0 {
		who = "root"
	}
	fmt.Fprintf(w, `# Performance

Written by `+"`make bench-sandbox`"+` on %s as %s, on a machine with %d processors (%s), Linux %s, %s.
The sides of a comparison were measured in turns in one run, but what is among 200 sandboxes after what is beside one; each
figure is the median of the runs. Other machines give other figures: run it on yours.

| what | p50 ms | p99 ms |
|---|---:|---:|
`, time.Now().UTC().Format(time.DateOnly), who, goruntime.NumCPU(), cpu, unix.ByteSliceToString(uts.Release[:]), goruntime.Version())
	for _, row := range rows {
		p50, ok := values[row.bench+" "+row.side+"-p50-ms"]
		if !ok {
			continue
		}
		p99 := values[row.bench+" "+row.side+"-p99-ms"]
		fmt.Fprintf(w, "| %s | %.2f | %.2f |\n", row.title, median(p50), median(p99))
	}
	fmt.Fprint(w, "\n| what (p50) | measured | goal | |\n|---|---:|---:|---|\n")
	for _, g := range goals {
		v, ok := values[g.bench+" "+g.metric]
		if !ok {
			continue
		}
		measured := median(v)
		if g.over != "" {
			base, ok := values[g.bench+" "+g.over]
			if !ok {
				continue
			}
			measured /= median(base)
		}
		sign, held := "≤", measured <= g.bound
		if g.least {
			sign, held = "≥", measured >= g.bound
		}
		verdict := "held"
		if !held {
			verdict = "**missed**"
		}
		fmt.Fprintf(w, "| %s | %.2f%s | %s %g%s | %s |\n", g.what, measured, g.unit, sign, g.bound, g.unit, verdict)
	}
	for _, line := range absent {
		fmt.Fprintf(w, "\n- %s", line)
	}
	if len(absent) > 0 {
		fmt.Fprintln(w)
	}
	return nil
}

// read collects metrics: "Benchmark metric" -> one value a run; and remarks about peers that do
// not run here.
func read(r io.Reader) (values map[string][]float64, absent []string, cpu string, err error) {
	values, cpu = map[string][]float64{}, "unknown"
	scan := bufio.NewScanner(r)
	for scan.Scan() {
		line := scan.Text()
		if name, ok := strings.CutPrefix(line, "cpu: "); ok {
			cpu = name
		}
		if _, said, ok := strings.Cut(line, ": peer "); ok && !slices.Contains(absent, "Peer "+said) {
			absent = append(absent, "Peer "+said)
		}
		fields := strings.Fields(line)
		if len(fields) < 4 || !strings.HasPrefix(fields[0], "Benchmark") {
			continue
		}
		name, _, _ := strings.Cut(fields[0], "-")
		for i := 2; i+1 < len(fields); i += 2 {
			v, err := strconv.ParseFloat(fields[i], 64)
			if err != nil {
				return nil, nil, "", fmt.Errorf("read %q: %w", line, err)
			}
			key := name + " " + fields[i+1]
			values[key] = append(values[key], v)
		}
	}
	return values, absent, cpu, scan.Err()
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}
