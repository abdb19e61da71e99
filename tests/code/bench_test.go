package code

import (
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// BenchmarkPython takes turns: the host's python3 -c, a line of Python in a new sandbox that is
// deleted, over the API and by the command line, and one in a running sandbox. It reports medians.
func BenchmarkPython(b *testing.B) {
	const line = "print(1)"
	d := harness.Start(b, harness.Options{})
	c := d.Client(b)
	s := d.Create(b, api.CreateSandbox{})
	check := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	ways := []struct {
		name string
		run  func()
	}{
		{"host-ms", func() { check(exec.CommandContext(b.Context(), "/usr/bin/python3", "-c", line).Run()) }},
		{"fresh-ms", func() {
			sb, err := c.CreateSandbox(b.Context(), api.CreateSandbox{})
			check(err)
			_, err = c.RunCode(b.Context(), sb.ID, api.CodeRequest{Code: line})
			check(err)
			check(c.DeleteSandbox(b.Context(), sb.ID))
		}},
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
	took := make([][]time.Duration, len(ways))
	for b.Loop() {
		for i, w := range ways {
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
}
