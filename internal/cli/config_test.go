package cli

import (
	"bytes"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/internal/boot"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/dirs"
)

const userConfig = "/home/u/.config/sandboxd/sandboxd.yaml"

// testHost is a host of config files with an environment.
func testHost(uid int, files, env map[string]string) configHost {
	h := configHost{uid: uid, files: []string{dirs.SystemConfig}, getenv: func(name string) string { return env[name] }}
	if uid != 0 {
		h.files = append(h.files, userConfig)
	}
	h.read = func(path string) ([]byte, error) {
		text, ok := files[path]
		if !ok {
			return nil, os.ErrNotExist
		}
		return []byte(text), nil
	}
	return h
}

// parsed returns options and flags of serve after a command line.
func parsed(t *testing.T, args ...string) (*serveOptions, *pflag.FlagSet) {
	t.Helper()
	opts := newServeOptions()
	flags := settings(opts, new(string))
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	return opts, flags
}

func TestConfigPrecedence(t *testing.T) {
	system := "default-timeout: 1m\nlog-level: warn\npids: 100\nregistry-ca: [/a.pem, /b.pem]\ndata-dir: /srv/root\nmulti-tenant: true\n"
	user := "log-level: debug\nended-limit: 7\nregistry-ca: /own.pem\n"
	files := map[string]string{dirs.SystemConfig: system, userConfig: user, "/other.yaml": "pids: 300\n"}
	for _, tc := range []struct {
		name string
		uid  int
		env  map[string]string
		args []string
		want map[string]string // value and origin
	}{
		{"the user's file before the host's", 1000, nil, nil, map[string]string{
			"default-timeout": "1m0s /etc/sandboxd/sandboxd.yaml:1", "log-level": "debug " + userConfig + ":1", "ended-limit": "7 " + userConfig + ":2",
			"pids": "100 /etc/sandboxd/sandboxd.yaml:3", "registry-ca": "/own.pem " + userConfig + ":3", "idle-exit": "0s default",
			"data-dir": " default", "multi-tenant": "false default",
		}},
		{"a flag before both", 1000, nil, []string{"--log-level=error", "--registry-ca=/flag.pem", "--pids", "200"}, map[string]string{
			"log-level": "error flag", "registry-ca": "/flag.pem flag", "pids": "200 flag",
		}},
		{"root has the host's only", 0, map[string]string{"XDG_DATA_HOME": "/x"}, nil, map[string]string{
			"log-level": "warn /etc/sandboxd/sandboxd.yaml:2", "registry-ca": "/a.pem /b.pem /etc/sandboxd/sandboxd.yaml:4",
			"data-dir": "/srv/root /etc/sandboxd/sandboxd.yaml:5", "multi-tenant": "true /etc/sandboxd/sandboxd.yaml:6", "ended-limit": "0 default",
		}},
		{"another file", 1000, nil, []string{"--config", "/other.yaml"}, map[string]string{"pids": "300 /other.yaml:1", "log-level": "info default"}},
		{"no file", 1000, nil, []string{"--config", "none"}, map[string]string{"pids": "0 default", "log-level": "info default"}},
		{"the environment", 1000, map[string]string{"SANDBOXD_SOCKET": "/e.sock", "XDG_DATA_HOME": "/x"}, nil, map[string]string{
			"socket": "/e.sock environment SANDBOXD_SOCKET", "data-dir": " environment XDG_DATA_HOME",
		}},
		{"a flag before the environment", 1000, map[string]string{"SANDBOXD_SOCKET": "/e.sock"}, []string{"--socket=/f.sock"}, map[string]string{"socket": "/f.sock flag"}},
		{"started by a command", 1000, nil, []string{"--background"}, map[string]string{"idle-exit": "5m0s default"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			opts, flags := parsed(t, tc.args...)
			c, err := opts.load(flags, flags.Changed, testHost(tc.uid, files, tc.env))
			if err != nil {
				t.Fatal(err)
			}
			got := make(map[string]string)
			for name := range tc.want {
				text, _ := flagValue(flags.Lookup(name))
				from := c.origins[name]
				if from.kind == "" {
					from.kind = fromDefault
				}
				got[name] = text + " " + from.String()
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("values and origins (-want +got):\n%s", diff)
			}
		})
	}
}

// A value in a file beats the default that a command gives the daemon that it starts.
func TestConfigOfAStartedDaemon(t *testing.T) {
	opts, flags := parsed(t, "--background")
	if _, err := opts.load(flags, flags.Changed, testHost(1000, map[string]string{userConfig: "idle-exit: 1h\n"}, nil)); err != nil {
		t.Fatal(err)
	}
	if opts.IdleExit != time.Hour {
		t.Errorf("idle-exit is %v", opts.IdleExit)
	}
}

// Every setting has a kind that its flag reads, and every mistake in a value has its place.
func TestConfigMistakes(t *testing.T) {
	for text, want := range map[string]string{
		"memory: much":                      `:1:9: memory: "much" is no size such as 512m or 2g`,
		"memory: 1k":                        `:1:9: memory: "1k" is less than 67108864 bytes`,
		"default-timeout: 90":               `:1:18: default-timeout: "90": want a time span such as 90s or 1h30m`,
		"overcommit: .inf":                  `:1:13: overcommit: ".inf": want a number such as 0.5`,
		"overcommit: 0.5":                   `:1:13: overcommit 0.5: must be from 1 to 100`,
		"pids: 99999999999999999999":        `:1:7: pids: want an integer`,
		"pids: 5":                           `:1:7: pids 5: must be at least 64`,
		"log-files: 1":                      `:1:12: log-files 1: must be from 2 to 1000`,
		"\nlog-level: loud":                 `:2:12: log-level "loud": want debug, info, warn or error`,
		"pool: [host=0]":                    `:1:7: pool "host=0": want IMAGE=N`,
		"unpack-limits: height=3":           `:1:16: unpack-limits: "height" is none of entries, bytes, ratio and depth`,
		"ended-age: -1s":                    `:1:12: ended-age -1s is negative`,
		"secrets: secrets.yaml":             `:1:10: secrets: "secrets.yaml" is no absolute path`,
		"network-ceiling: ./p.yaml":         `:1:18: network-ceiling: "./p.yaml" is no absolute path`,
		"network-ceiling: nothing":          `:1:18: network-ceiling: `,
		"agent-inputs: /no/such":            `:1:15: agent-inputs "/no/such"`,
		"require: [cgroup, luck]":           `:1:10: require "luck": want some of cgroup`,
		"registry-mirror: docker.io":        `:1:18: registry-mirror: `,
		"config: /x":                        `:1:1: unknown setting "config"`,
		"background: true":                  `:1:1: unknown setting "background"`,
		"help: true":                        `:1:1: unknown setting "help"`,
		"log-level: debug\nlog-level: info": `:2:1: log-level is set twice, first in line 1`,
	} {
		stdout, stderr, err := checked(t, text)
		if err == nil || !strings.Contains(stderr, want) || strings.Contains(stderr, "strconv") || strings.Contains(stderr, "--") {
			t.Errorf("%q: %v\n got %s%s\nwant %s", text, err, stdout, stderr, want)
		}
	}
	if stdout, stderr, err := checked(t, "log-level: debug\nmemory: 2g\nnetwork-ceiling: pypi,npm\n"); err != nil || !strings.HasSuffix(stdout, ": ok\n") {
		t.Errorf("%s%s: %v", stdout, stderr, err)
	}
}

// Every mistake is told at once, of the file's form, of single values and of those that are checked
// last.
func TestConfigCheckTellsAllMistakes(t *testing.T) {
	_, stderr, err := checked(t, "log-level: loud\nnonesuch: 1\npids: many\nlog-files: 1\nended-age: -1h\nprofiles: relative\nrequire: [magic]\nagent-runs: 0\nimage-limit: 3x\nended-limit: 5\n"+
		"default-timeout: 0s\npool: [host=2,nonesuch]\n")
	if err == nil {
		t.Error("it is ok")
	}
	for _, want := range []string{":1:12: log-level", ":2:1: unknown setting", ":3:7: pids", ":4:12: log-files", ":5:12: ended-age", ":6:11: profiles", ":7:10: require", ":8:13: agent-runs", ":9:14: image-limit", ":11:18: default-timeout", ":12:7: pool"} {
		if strings.Count(stderr, want) != 1 {
			t.Errorf("%q is not there once", want)
		}
	}
	if n := strings.Count(stderr, "\n"); n != 11 {
		t.Errorf("%d lines:\n%s", n, stderr)
	}
}

// checked returns the outcome of config check of a file with the text.
func checked(t *testing.T, text string) (stdout, stderr string, err error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "sandboxd.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	d, read := capturing(t)
	opts := newServeOptions()
	opts.config = path
	err = runConfigCheck(opts, hostConfig(), d)
	stdout, stderr = read()
	return stdout, stderr, err
}

// capturing returns deps and a function that returns what was written to its outputs.
func capturing(t *testing.T) (deps, func() (string, string)) {
	t.Helper()
	var files []*os.File
	for _, name := range []string{"stdout", "stderr"} {
		f, err := os.Create(filepath.Join(t.TempDir(), name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		files = append(files, f)
	}
	d := testDeps
	d.Stdout, d.Stderr = files[0], files[1]
	d.Deps = d.WithSocket("")
	return d, func() (string, string) {
		var texts []string
		for _, f := range files {
			if _, err := f.Seek(0, io.SeekStart); err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(f)
			if err != nil {
				t.Fatal(err)
			}
			texts = append(texts, string(text))
		}
		return texts[0], texts[1]
	}
}

// A file that the daemon does not trust is an error, and so is one that is named and missing.
func TestConfigRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sandboxd.yaml")
	opts, flags := parsed(t, "--config", path)
	if _, err := opts.load(flags, flags.Changed, hostConfig()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := opts.load(flags, flags.Changed, hostConfig()); err == nil || !strings.Contains(err.Error(), "other users can write") {
		t.Errorf("writable: %v", err)
	}
}

func TestReload(t *testing.T) {
	files := map[string]string{dirs.SystemConfig: "pids: 100\n", userConfig: "log-level: warn\nended-limit: 3\n"}
	opts, flags := parsed(t, "--agent-age=5h")
	given := *opts
	c, err := opts.load(flags, flags.Changed, testHost(1000, files, nil))
	if err != nil {
		t.Fatal(err)
	}
	reload := reloader(given, flags, c)
	for _, step := range []struct {
		name, user string
		changed    []string
		check      func(boot.Options) bool
		err        string
	}{
		{"as it was", files[userConfig], nil, func(o boot.Options) bool { return o.EndedLimit == 3 && o.AgentAge == 5*time.Hour && o.Pids == 100 }, ""},
		{"a flag stays", "agent-age: 1h\nlog-level: warn\nended-limit: 3\n", nil, func(o boot.Options) bool { return o.AgentAge == 5*time.Hour }, ""},
		{"a mistake", "ended-limit: 4\nlog-level: loud\n", nil, nil, ":2:12: log-level \"loud\""},
		{"no setting", "ended-limits: 4\n", nil, nil, ":1:1: unknown setting"},
		{"new and gone", "ended-limit: 4\n", []string{"ended-limit", "log-level"}, func(o boot.Options) bool { return o.EndedLimit == 4 && o.LogLevel == 0 }, ""},
		{"the same once more", "ended-limit: 4\n", nil, func(o boot.Options) bool { return o.EndedLimit == 4 }, ""},
		{"one for a restart", "ended-limit: 4\nlog-size: 1m\n", []string{"log-size"}, func(o boot.Options) bool { return o.LogSize == 1<<20 }, ""},
		{"which is told until then", "ended-limit: 4\nlog-size: 1m\n", []string{"log-size"}, func(o boot.Options) bool { return true }, ""},
	} {
		o, changed, err := reload(map[string][]byte{dirs.SystemConfig: []byte(files[dirs.SystemConfig]), userConfig: []byte(step.user)})
		if step.err != "" {
			if err == nil || !strings.Contains(err.Error(), step.err) {
				t.Errorf("%s: %v", step.name, err)
			}
			continue
		}
		if err != nil || !slices.Equal(changed, step.changed) || !step.check(o) {
			t.Errorf("%s: changed %v, %v\n%+v", step.name, changed, err, o)
		}
	}
	// A file that is being replaced: the defaults could delete what its values keep.
	if _, _, err := reload(map[string][]byte{dirs.SystemConfig: []byte(files[dirs.SystemConfig])}); err == nil || !strings.Contains(err.Error(), userConfig+" is missing") {
		t.Errorf("without a file: %v", err)
	}
}

// The kinds of settings are those of the flags, and no flag is forgotten.
func TestSettingsAreTheFlags(t *testing.T) {
	kinds := settingKinds()
	var flags []string
	newServe(testDeps).Flags().VisitAll(func(f *pflag.Flag) {
		if isSetting(f) {
			flags = append(flags, f.Name)
		}
	})
	flags = append(flags, flagSocket)
	slices.Sort(flags)
	if diff := cmp.Diff(flags, slices.Sorted(maps.Keys(kinds))); diff != "" {
		t.Errorf("settings (-flags +settings):\n%s", diff)
	}
	for name, kind := range map[string]config.Kind{
		"memory": config.Text, "pids": config.Integer, "overcommit": config.Number, "multi-tenant": config.Bool, "pool": config.List, "require": config.List,
		"default-timeout": config.Text, "unpack-limits": config.Text, "log-level": config.String, flagSocket: config.String,
	} {
		if kinds[name] != kind {
			t.Errorf("%s is of kind %v", name, kinds[name])
		}
	}
	for _, name := range ofRoot {
		if _, ok := kinds[name]; !ok {
			t.Errorf("%s is no setting", name)
		}
	}
	for name := range kinds {
		if boot.Reloadable(name) && slices.Contains(ofRoot, name) {
			t.Errorf("%s is reloaded and of root", name)
		}
	}
}

func TestConfigShow(t *testing.T) {
	d, read := capturing(t)
	opts, flags := parsed(t, "--pool=host=4", "--data-dir=/d", "--runtime-dir=/r")
	h := testHost(1000, map[string]string{dirs.SystemConfig: "data-dir: /srv\n", userConfig: "memory: 2g\n"}, nil)
	if err := runConfigShow(t.Context(), opts, flags, false, h, d); err != nil {
		t.Fatal(err)
	}
	stdout, stderr := read()
	lines := make(map[string]string)
	for line := range strings.Lines(stdout) {
		fields := strings.Fields(line)
		lines[fields[0]] = strings.Join(fields[1:], " ")
	}
	for name, want := range map[string]string{
		"SETTING": "VALUE ORIGIN", "pool": "host=4 flag", "memory": "2GiB " + userConfig + ":1", "data-dir": "/d flag", "socket": "/r/api.sock default", "log-files": "3 default",
	} {
		if lines[name] != want {
			t.Errorf("%s: %q, want %q", name, lines[name], want)
		}
	}
	if want := dirs.SystemConfig + ":1:11: data-dir is for the daemon of root; yours does not take it from here\n"; stderr != want {
		t.Errorf("stderr %q", stderr)
	}
	d, read = capturing(t)
	opts, flags = parsed(t, "--data-dir=/d", "--runtime-dir=/r")
	if err := runConfigShow(t.Context(), opts, flags, true, h, d); err != nil {
		t.Fatal(err)
	}
	stdout, _ = read()
	for _, want := range []string{
		`"name": "memory",` + "\n    " + `"value": "2GiB",` + "\n    " + `"origin": "file",` + "\n    " + `"file": "` + userConfig + `",` + "\n    " + `"line": 1`,
		`"name": "pool",` + "\n    " + `"value": [],` + "\n    " + `"origin": "default"`,
	} {
		if !bytes.Contains([]byte(stdout), []byte(want)) {
			t.Errorf("no %s in\n%s", want, stdout)
		}
	}
}
