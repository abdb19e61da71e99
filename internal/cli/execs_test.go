package cli

import (
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/cmdline/cmdtest"
)

func TestExecCommands(t *testing.T) {
	for name, tc := range map[string]struct {
		args           string
		stdout, stderr string // substrings
		code           int
		asked          string // the requested signal
	}{
		"detach":               {"exec -d sb1 -- echo", "x1\n", "", 0, ""},
		"detach, json":         {"exec -d --json sb1 -- echo", `"id": "x1"`, "", 0, ""},
		"detach in nothing":    {"exec -d nope -- echo", "", "nope", 125, ""},
		"limit without number": {"exec --rlimit nofile sb1 -- echo", "", "nofile", 125, ""},
		"execs":                {"execs sb1", `exited (9)`, "", 0, ""},
		"execs, quoted":        {"execs sb1", `sh -c 'it'\''s\x1b[2J'`, "", 0, ""},
		"execs, quiet":         {"execs -q sb1", "x1\n", "", 0, ""},
		"execs, json":          {"execs --json sb1", `"id": "x1"`, "", 0, ""},
		"execs of nothing":     {"execs nope", "", "nope", 1, ""},
		"execs without":        {"execs", "", "no argument is given; as in: sandboxd execs [flags] SANDBOX", 2, ""},
		"attach, json":         {"attach --json sb1 x1", `"text":"out\n"`, "", 9, ""},
		"attach to main":       {"attach --json sb1", `"text":"out\n"`, "", 9, ""},
		"attach, both":         {"attach --json -i sb1 x1", "", "--json", 125, ""},
		"attach to nothing":    {"attach sb1 x2", "", "x2", 125, ""},
		"logs":                 {"logs sb1", "one\ntwo\nthree\n", "7 bytes", 0, ""},
		"logs, stderr":         {"logs sb1", "", "\xff\n", 0, ""},
		"logs, with times":     {"logs --timestamps sb1", "1970-01-01T00:00:01Z one\n1970-01-01T00:00:01Z two\n1970-01-01T00:00:03Z three\n", "1970-01-01T00:00:02Z \xff\n", 0, ""},
		"logs, some":           {"logs --tail 3 --since 2020-01-02T03:04:05Z sb1", "three\n", "7 bytes", 0, "since=2020-01-02T03%3A04%3A05Z&tail=3"},
		"logs, json":           {"logs --json sb1", `"text":"one\ntw","dropped":7}`, "", 0, ""},
		"logs, cut off":        {"logs -f sb1", "three\n", "stopping", 1, "follow=true"},
		"logs, bad tail":       {"logs --tail -1 sb1", "", "--tail", 2, ""},
		"logs, bad since":      {"logs --since yesterday sb1", "", "--since", 2, ""},
		"logs of nothing":      {"logs nope", "", "nope", 1, ""},
		"wait":                 {"wait sb1", "137\n", "", 0, ""},
		"wait, json":           {"wait --json sb1", `"signal": "SIGKILL"`, "", 0, ""},
		"wait for nothing":     {"wait nope", "", "nope", 1, ""},
		"kill":                 {"kill sb1 x1", "", "", 0, "SIGKILL all"},
		"kill of the main":     {"kill sb1", "", "", 0, "SIGKILL all"},
		"kill with a signal":   {"kill -s HUP sb1 x1", "", "", 0, "HUP"},
		"signal to all":        {"kill -s HUP --all sb1 x1", "", "", 0, "HUP all"},
		"all without a signal": {"kill --all sb1 x1", "", "--signal", 2, ""},
		"top":                  {"top sb1", "1.23s", "", 0, ""},
		"top, hostile":         {"top sb1", `[gone\x1b]`, "", 0, ""},
		"top, json":            {"top --json sb1", `"pid": 7`, "", 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := cmdtest.New()
			oneSandbox(f)
			got := inline(t, f.Start(t), "", strings.Fields(tc.args)...)
			if got.Code != tc.code || !strings.Contains(got.Stdout, tc.stdout) || !strings.Contains(got.Stderr, tc.stderr) || (tc.stderr == "") != (got.Stderr == "") {
				t.Errorf("exit %d, want %d\nstdout: %q\nstderr: %q", got.Code, tc.code, got.Stdout, got.Stderr)
			}
			if asked := strings.Join(f.Updates, ";"); asked != tc.asked {
				t.Errorf("asked for %q", asked)
			}
		})
	}
}
