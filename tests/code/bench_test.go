package code

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// BenchmarkPython takes turns: the host's python3 -c, a line of Python in a new sandbox that is
// deleted, over the API and by the command line, one in a sandbox that was parked, one in the first
// context of a sandbox in which an interpreter waited, one in a running sandbox, and podman's run
// and exec, for an ordinary user with a podman. Pools are full before each turn. It reports
// medians.
func BenchmarkPython(b *testing.B) {
	const line = "print(1)"
	d := harness.Start(b, harness.Options{})
	c := d.Client(b)
	s := d.Create(b, api.CreateSandbox{})
	pooled := harness.Start(b, harness.Options{Args: []string{"--pool", "host=4"}})
	parked := pooled.Client(b)
	waiting := harness.Start(b, harness.Options{Args: []string{"--pool", "host=4,context=python"}})
	awaited := waiting.Client(b)
	check := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	fresh := func(c *client.Client) {
		b.Helper()
		sb, err := c.CreateSandbox(b.Context(), api.CreateSandbox{})
		check(err)
		_, err = c.RunCode(b.Context(), sb.ID, api.CodeRequest{Code: line})
		check(err)
		check(c.DeleteSandbox(b.Context(), sb.ID))
	}
	first := func() {
		b.Helper()
		sb, err := awaited.CreateSandbox(b.Context(), api.CreateSandbox{})
		check(err)
		made, err := awaited.CreateContext(b.Context(), sb.ID, api.CreateContext{})
		check(err)
		_, err = awaited.RunCode(b.Context(), sb.ID, api.CodeRequest{Context: made.ID, Code: line})
		check(err)
		check(awaited.DeleteSandbox(b.Context(), sb.ID))
	}
	type way struct {
		name string
		run  func()
	}
	ways := []way{
		{"host-ms", func() { check(exec.CommandContext(b.Context(), "/usr/bin/python3", "-c", line).Run()) }},
		{"fresh-ms", func() { fresh(c) }},
		{"parked-ms", func() { fresh(parked) }},
		{"context-ms", first},
		{"cli-ms", func() {
			if got := d.CLI(b, "code", "--code", line); got.Code != 0 {
				b.Fatalf("%+v", got)
			}
		}},
		{"running-ms", func() {
			_, err := c.RunCode(b.Context(), s.ID, api.CodeRequest{Code: line})
			check(err)
		}},
		{"exec-ms", func() {
			_, err := c.Exec(b.Context(), s.ID, api.ExecRequest{Argv: []string{"python3", "-c", line}})
			check(err)
		}},
	}
	// As root podman wants controllers that not every host has.
	if _, err := exec.LookPath("podman"); err == nil && os.Getuid() != 0 {
		podman := harness.PodmanHost(b)
		python := []string{"/usr/bin/python3", "-c", line}
		check(podman.Run(b.Context(), []string{"--detach", "--name", "running"}, "/bin/sleep", "100000").Run())
		b.Cleanup(func() { _ = podman.Command(context.Background(), "rm", "--force", "--time", "0", "running").Run() })
		ways = append(ways, way{"podman-run-ms", func() { check(podman.Run(b.Context(), nil, python...).Run()) }},
			way{"podman-exec-ms", func() { check(podman.Command(b.Context(), append([]string{"exec", "running"}, python...)...).Run()) }})
	}
	full := func() { // or they are filled in the others' turns
		harness.Eventually(b, func() error {
			for _, p := range append(pooled.System(b).Pools, waiting.System(b).Pools...) {
				if p.Ready < p.Size || p.Context != nil && p.Context.Ready < p.Size {
					return fmt.Errorf("the pool is not full: %+v", p)
				}
			}
			return nil
		})
	}
	took := make([][]time.Duration, len(ways))
	for b.Loop() {
		for i, w := range ways {
			full()
			begun := time.Now()
			w.run()
			took[i] = append(took[i], time.Since(begun))
		}
	}
	medians := make([]float64, len(ways))
	for i, w := range ways {
		slices.Sort(took[i])
		medians[i] = float64(took[i][len(took[i])/2].Microseconds()) / 1000
		b.ReportMetric(medians[i], w.name)
	}
	b.ReportMetric(medians[1]/medians[0], "fresh/host")
	b.ReportMetric(medians[2]/medians[0], "parked/host")
	b.ReportMetric(medians[3]/medians[0], "context/host")
	hits := waiting.System(b).Pools[0].Context.Hits
	b.ReportMetric(float64(hits)/float64(len(took[3])), "waited/context")
}

// spread returns the median and the 99th percentile in milliseconds.
func spread(took []time.Duration) (p50, p99 float64) {
	slices.Sort(took)
	at := func(i int) float64 { return float64(took[i].Microseconds()) / 1000 }
	return at(len(took) / 2), at(len(took) * 99 / 100)
}

// BenchmarkContexts measures, over the API, a new context with its first result, which imports
// numpy and pandas if the host has them, with and without preload, and runs in a context. A spare
// gets the time to become ready, of four creations without one.
func BenchmarkContexts(b *testing.B) {
	d := harness.Start(b, harness.Options{})
	c := d.Client(b)
	s := d.Create(b, api.CreateSandbox{})
	modules := []string{"decimal", "json", "asyncio", "unittest"}
	if exec.CommandContext(b.Context(), "/usr/bin/python3", "-c", "import numpy, pandas").Run() == nil {
		modules = []string{"numpy", "pandas"}
	}
	run := func(id, code string) {
		b.Helper()
		res, err := c.RunCode(b.Context(), s.ID, api.CodeRequest{Context: id, Code: code})
		if err != nil || res.Failure != nil {
			b.Fatalf("%+v, %v", res, err)
		}
	}
	first := "import " + strings.Join(modules, ", ") + "\n1"
	fresh := func(preload []string) time.Duration {
		b.Helper()
		begun := time.Now()
		made, err := c.CreateContext(b.Context(), s.ID, api.CreateContext{Preload: preload, Env: []string{"PATH=/usr/bin:/bin"}})
		if err != nil {
			b.Fatal(err)
		}
		run(made.ID, first)
		took := time.Since(begun)
		if err := c.DeleteContext(b.Context(), s.ID, made.ID); err != nil {
			b.Fatal(err)
		}
		return took
	}
	warm, err := c.CreateContext(b.Context(), s.ID, api.CreateContext{})
	if err != nil {
		b.Fatal(err)
	}
	var cold, spare, warms []time.Duration
	fresh(modules)
	for b.Loop() {
		took := fresh(nil)
		cold = append(cold, took)
		time.Sleep(4 * took)
		spare = append(spare, fresh(modules))
		for range 10 {
			begun := time.Now()
			run(warm.ID, "1")
			warms = append(warms, time.Since(begun))
		}
	}
	for name, took := range map[string][]time.Duration{"cold": cold, "preload": spare, "warm": warms} {
		p50, p99 := spread(took)
		b.ReportMetric(p50, name+"-ms")
		b.ReportMetric(p99, name+"-p99-ms")
	}
}

// BenchmarkBusyContexts has 64 contexts in four sandboxes run at once for some seconds. It reports
// the runs of all in a second, and those of the slowest context as a part of the fastest's.
func BenchmarkBusyContexts(b *testing.B) {
	d := harness.Start(b, harness.Options{})
	var made []*api.Context
	for range 4 {
		s := d.Create(b, api.CreateSandbox{})
		for range 16 {
			c, err := d.Client(b).CreateContext(b.Context(), s.ID, api.CreateContext{})
			if err != nil {
				b.Fatal(err)
			}
			made = append(made, c)
		}
	}
	for b.Loop() {
		turns := make([]int, len(made))
		begun := time.Now()
		var work sync.WaitGroup
		for i, m := range made {
			c := d.Client(b)
			work.Go(func() {
				for ; time.Since(begun) < 5*time.Second; turns[i]++ {
					if _, err := c.RunCode(b.Context(), m.Sandbox, api.CodeRequest{Context: m.ID, Code: "sum(range(10000))"}); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		work.Wait()
		all := 0
		for _, n := range turns {
			all += n
		}
		b.ReportMetric(float64(all)/time.Since(begun).Seconds(), "runs/s")
		b.ReportMetric(float64(slices.Min(turns))/float64(slices.Max(turns)), "min/max")
	}
}
