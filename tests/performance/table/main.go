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

// rows is what the page shows: benchmark, side, and the side that it is compared with.
var rows = []struct{ bench, side, title string }{
	{"BenchmarkExecTrue", "sandbox", "exec of a static `true` in a running sandbox, over the socket"},
	{"BenchmarkExecTrue", "host", "the same: fork and exec on the host"},
	{"BenchmarkCreateRunDelete", "sandboxd", "create a sandbox of the host image → first byte of its program → delete"},
	{"BenchmarkCreateRunDelete", "create", "– of this, the creation"},
	{"BenchmarkCreateRunDelete", "exec", "– the program"},
	{"BenchmarkCreateRunDelete", "delete", "– the deletion"},
	{"BenchmarkCreateRunDelete", "runc", "the same: `runc run` of an equal bundle, rootless"},
	{"BenchmarkHealth", "request", "one HTTP request over the socket that does nothing"},
}

func run(r io.Reader, w io.Writer) error {
	values, cpu, err := read(r)
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

Written by `+"`make bench`"+` on %s as %s, on a machine with %d processors (%s), Linux %s, %s.
The two sides of a comparison were measured in turns in one run; each figure is the median of the runs. Other machines
give other figures: run it on yours.

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
	fmt.Fprintln(w)
	for _, c := range []struct{ bench, a, b, sentence string }{
		{"BenchmarkExecTrue", "sandbox", "host", "An exec in a sandbox takes %.2f times what fork and exec of the same program take on the host (p50).\n"},
		{"BenchmarkCreateRunDelete", "sandboxd", "runc", "A whole sandbox takes %.2f times what `runc run` takes (p50).\n"},
	} {
		a, b := values[c.bench+" "+c.a+"-p50-ms"], values[c.bench+" "+c.b+"-p50-ms"]
		if len(a) > 0 && len(b) > 0 {
			fmt.Fprintf(w, c.sentence, median(a)/median(b))
		}
	}
	return nil
}

// read collects metrics: "Benchmark metric" -> one value a run.
func read(r io.Reader) (values map[string][]float64, cpu string, err error) {
	values, cpu = map[string][]float64{}, "unknown"
	scan := bufio.NewScanner(r)
	for scan.Scan() {
		line := scan.Text()
		if name, ok := strings.CutPrefix(line, "cpu: "); ok {
			cpu = name
		}
		fields := strings.Fields(line)
		if len(fields) < 4 || !strings.HasPrefix(fields[0], "Benchmark") {
			continue
		}
		name, _, _ := strings.Cut(fields[0], "-")
		for i := 2; i+1 < len(fields); i += 2 {
			v, err := strconv.ParseFloat(fields[i], 64)
			if err != nil {
				return nil, "", fmt.Errorf("read %q: %w", line, err)
			}
			key := name + " " + fields[i+1]
			values[key] = append(values[key], v)
		}
	}
	return values, cpu, scan.Err()
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}
