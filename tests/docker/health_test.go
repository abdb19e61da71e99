package docker

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// The checks of a request and of an image are run, and every client sees how they end.
func TestHealth(t *testing.T) {
	testenv.SameForAll(t)
	f := start(t)
	f.images(t)
	context := filepath.Join(f.home, "context")
	if err := os.Mkdir(context, 0o755); err != nil {
		t.Fatal(err)
	}
	dockerfile := "FROM tool:1\nHEALTHCHECK --interval=1s --timeout=20s --retries=2 CMD test -e /tmp/works\nCMD [\"sleep\", \"1000\"]\n"
	if err := os.WriteFile(filepath.Join(context, "Dockerfile"), []byte(dockerfile), 0o644); err != nil {
		t.Fatal(err)
	}
	for which, docker := range f.clients(t) {
		t.Run(which, func(t *testing.T) {
			f.must(t, docker, "build", "-t", "checked:1", context)
			await := func(name, want string) {
				t.Helper()
				harness.Eventually(t, func() error {
					got := f.must(t, docker, "inspect", "--format", "{{.State.Health.Status}}", name)
					if strings.TrimSpace(got) != want {
						return fmt.Errorf("%s is %q, want %q", name, got, want)
					}
					return nil
				})
			}
			f.must(t, docker, "run", "-d", "--name", "own", "--health-cmd", "echo looked; test -e /tmp/works", "--health-interval", "1s", "--health-timeout", "20s",
				"--health-retries", "2", "--health-start-period", "1ms", image, "sleep", "1000")
			f.must(t, docker, "run", "-d", "--name", "images", "checked:1")
			f.must(t, docker, "run", "-d", "--name", "both", "--health-retries", "1", "checked:1")
			f.must(t, docker, "run", "-d", "--name", "unchecked", "--no-healthcheck", "checked:1")
			f.must(t, docker, "create", "--name", "patient", "--health-cmd", "true", "--health-interval", "1h", image, "sleep", "1000")
			for _, name := range []string{"own", "images", "both"} {
				await(name, "unhealthy")
				f.must(t, docker, "exec", name, "touch", "/tmp/works")
				await(name, "healthy")
			}
			harness.Eventually(t, func() error { // an event follows its state
				all := f.events(t, `{"container":["images"],"event":["health_status"]}`)
				if len(all) < 2 || !strings.HasPrefix(all[len(all)-2], "container health_status: unhealthy ") || !strings.HasPrefix(all[len(all)-1], "container health_status: healthy ") {
					return fmt.Errorf("events: %q", all)
				}
				return nil
			})
			f.runLines(t, which, docker, []line{
				{args: "inspect --format '{{with .Config.Healthcheck}}{{.Test}} {{.Interval}} {{.Timeout}} {{.StartPeriod}} {{.Retries}}{{end}}' own", out: `^\[CMD-SHELL echo looked; test -e /tmp/works\] 1s 20s 1ms 2\n$`},
				{args: "inspect --format '{{.Config.Healthcheck.Test}} {{.Config.Healthcheck.Interval}} {{.Config.Healthcheck.Retries}}' images", out: `^\[.*test -e /tmp/works\] 1s 2\n$`},
				{args: "inspect --format '{{.Config.Healthcheck.Interval}} {{.Config.Healthcheck.Retries}}' both", out: `^1s 1\n$`},
				{args: "inspect --format '{{.State.Health.FailingStreak}} {{range .State.Health.Log}}{{.ExitCode}} {{.Output}}{{end}}' own", out: `^0 (?:[01] looked\n)*0 looked\n\n$`},
				{args: "inspect --format '{{range .State.Health.Log}}{{.Start.Before .End}} {{end}}' own", out: `^(true )+\n$`},
				{args: "inspect --format '{{.State.Health}} {{.Config.Healthcheck.Test}}' unchecked", out: `^<nil> \[NONE\]\n$`},
				{args: "start patient"},
				{args: "ps --filter name=patient --format {{.Status}}", out: `^Up .* \(health: starting\)\n$`},
				{args: "ps --filter name=own --format {{.Status}}", out: `^Up .* \(healthy\)\n$`},
				{args: "ps --filter name=unchecked --format {{.Status}}", out: `^Up [^(]*\n$`},
				{args: "ps --filter health=healthy --format {{.Names}}", out: `^both\nimages\nown\n$`},
				{args: "ps --filter health=starting --format {{.Names}}", out: `^patient\n$`},
				{args: "ps --filter health=none --format {{.Names}}", out: `^unchecked\n$`},
				{args: "ps --filter health=unhealthy --format {{.Names}}", out: `^$`},
				{args: "ps --filter health=ill", code: 1, err: `invalid filter 'health=ill'`},
				{args: "create --health-cmd true --health-interval 10ms tool:1", code: 1, err: `health_check.interval 0.01: must be at least 1 second`},
				{args: "create --health-retries 3 tool:1", code: 1, err: `the image has no HEALTHCHECK`},
				{args: "rm -f own images both unchecked patient"},
				{args: "ps -aq", out: `^$`},
			}, os.Getenv)
		})
	}
}
