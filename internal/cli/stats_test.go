package cli

import (
	"context"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

func twoSandboxes(f *cmdtest.Daemon) {
	f.Sandboxes = []api.Sandbox{{ID: "sb1", Name: "first", State: api.StateRunning}, {ID: "sb2", Name: "se\x1bcond", State: api.StateRunning}}
}

// sampled runs stats against a fake daemon, with two ticks due.
func sampled(t *testing.T, opts statsOptions) string {
	t.Helper()
	f := cmdtest.New()
	twoSandboxes(f)
	out, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	tick := make(chan time.Time, 2)
	tick <- time.Time{}
	tick <- time.Time{}
	d := deps{Deps: cmdline.Deps{Stdout: out, Stderr: os.Stderr}.WithSocket(f.Start(t))}
	if err := runStats(t.Context(), nil, opts, tick, d); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(out.Name())
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Without a terminal the table is printed once, with the processor time between two samples. A
// limit that the kernel does not enforce is not shown.
func TestStatsOfAll(t *testing.T) {
	want := "ID    NAME         CPU %    MEM USAGE / LIMIT   MEM %    NET I/O     BLOCK I/O     PIDS\n" +
		"sb1   first        25.00%   64MiB / 256MiB      25.00%   2kB / 1kB   1.5kB / 7kB   3\n" +
		"sb2   se\\x1bcond   25.00%   64MiB / --          --       --          --            3\n"
	if got := sampled(t, statsOptions{noStream: true}); got != want {
		t.Error(cmp.Diff(want, got))
	}
	if got := sampled(t, statsOptions{}); got != want {
		t.Error(cmp.Diff(want, got))
	}
	if got, want := sampled(t, statsOptions{format: "{{.Name}} {{.Container}} {{.CPUPerc}} {{.MemPerc}} {{.PIDs}}"}), "first first 25.00% 25.00% 3\nse\\x1bcond se\\x1bcond 25.00% -- 3\n"; got != want {
		t.Error(cmp.Diff(want, got))
	}
	if got := sampled(t, statsOptions{json: true}); !strings.HasPrefix(got, "{\n  \"sandboxes\": [\n") || strings.Count(got, `"limit": 268435456`) != 1 {
		t.Errorf("%s", got)
	}
}

// A counter that has fallen is that of another life.
func TestStatsOfARestartedSandbox(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	sample := func(id string, used float64, at time.Time) api.SandboxStats {
		return api.SandboxStats{ID: id, Stats: api.Stats{At: at, CPU: &api.CPUStats{UsageMS: &used}}}
	}
	before := []api.SandboxStats{sample("a", 500, at), sample("b", 0, at), sample("c", 0, at)}
	rows := statsRows(before, []api.SandboxStats{sample("a", 10, at.Add(time.Second)), sample("b", 4000, at.Add(2*time.Second)), sample("c", 1, at), sample("d", 1, at), {ID: "b"}})
	var got []string
	for _, r := range rows {
		got = append(got, r.ID+" "+r.CPUPerc())
	}
	if diff := cmp.Diff([]string{"a --", "b 200.00%", "c --", "d --", "b --"}, got); diff != "" {
		t.Error(diff)
	}
}

// On a terminal the table is renewed at each tick, until the command is interrupted.
func TestStatsLive(t *testing.T) {
	master, slave := cmdtest.OpenPTY(t)
	screen := cmdtest.Watch(master)
	f := cmdtest.New()
	twoSandboxes(f)
	ctx, cancel := context.WithCancelCause(t.Context())
	tick := make(chan time.Time)
	done := make(chan error)
	d := deps{Deps: cmdline.Deps{Stdout: slave, Stderr: slave}.WithSocket(f.Start(t))}
	go func() { done <- runStats(ctx, nil, statsOptions{}, tick, d) }()
	screen.WaitFor(t, "first        --")
	tick <- time.Time{}
	screen.WaitFor(t, "first        25.00%")
	tick <- time.Time{} // taken: the second table has been printed whole
	cancel(io.EOF)
	if err := <-done; err == nil {
		t.Error("an interrupted command reported success")
	}
	if n := strings.Count(screen.Output(), clearScreen); n < 2 {
		t.Errorf("%d tables", n)
	}
}
