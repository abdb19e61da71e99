package config

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

var testKinds = map[string]Kind{
	"log-level": String, "memory": Text, "multi-tenant": Bool, "pids": Integer, "overcommit": Number, "pool": List,
}

func TestParse(t *testing.T) {
	at := func(line, column int) Place { return Place{"f.yaml", line, column} }
	const text = `# a comment
log-level: debug
memory: 20g
multi-tenant: true
pids: 4096
overcommit: 1.5
pool:
  - host=4
  - debian:12=2
`
	want := []Setting{
		{"log-level", []string{"debug"}, at(2, 12)},
		{"memory", []string{"20g"}, at(3, 9)},
		{"multi-tenant", []string{"true"}, at(4, 15)},
		{"pids", []string{"4096"}, at(5, 7)},
		{"overcommit", []string{"1.5"}, at(6, 13)},
		{"pool", []string{"host=4", "debian:12=2"}, at(8, 3)},
	}
	got, err := Parse("f.yaml", []byte(text), testKinds)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("settings (-want +got):\n%s", diff)
	}
	for _, empty := range []string{"", "# nothing\n", "---\n", "null\n"} {
		if got, err := Parse("f.yaml", []byte(empty), testKinds); err != nil || len(got) != 0 {
			t.Errorf("%q: %v, %v", empty, got, err)
		}
	}
	for text, values := range map[string][]string{"pool: host=4": {"host=4"}, "pool: []": {}, "memory: 1048576": {"1048576"}} {
		got, err := Parse("f.yaml", []byte(text), testKinds)
		if err != nil || len(got) != 1 || !cmp.Equal(got[0].Values, values) {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
}

// Every mistake has its place, and what to write instead.
func TestMistakes(t *testing.T) {
	for text, want := range map[string]string{
		"loglevel: debug":                  `f.yaml:1:1: unknown setting "loglevel"; did you mean log-level?`,
		"log_level: debug":                 `f.yaml:1:1: unknown setting "log_level"; did you mean log-level?`,
		"\nfrobnicate: 1":                  `f.yaml:2:1: unknown setting "frobnicate"; the names are those of the flags of sandboxd serve`,
		"pids: 64\nlog-level: a\npids: 65": `f.yaml:3:1: pids is set twice, first in line 1; remove one`,
		"pids: many":                       `f.yaml:1:7: pids: want an integer`,
		"pids: 1.5":                        `f.yaml:1:7: pids: want an integer`,
		`multi-tenant: "true"`:             `f.yaml:1:15: multi-tenant: want true or false`,
		"multi-tenant: yes please":         `f.yaml:1:15: multi-tenant: want true or false`,
		"log-level: 5":                     `f.yaml:1:12: log-level: want a string; write "5"`,
		"log-level: [debug]":               `f.yaml:1:12: log-level: want a string`,
		"memory: {max: 1g}":                `f.yaml:1:9: memory: want a string or a number`,
		"pool: [host=4, 5]":                `f.yaml:1:16: pool: want a list of strings; write "5"`,
		"pool: [[host=4]]":                 `f.yaml:1:8: pool: want a list of strings`,
		"log-level:":                       `f.yaml:1:11: log-level has no value; want a string, or remove the line`,
		"memory: &m 1g\nlog-level: *m":     `f.yaml:2:12: log-level: aliases are not read; write the value`,
		"- log-level":                      `f.yaml:1:1: want settings, each as NAME: VALUE on a line`,
		"[a]: b":                           `f.yaml:1:1: the name of a setting is a word, such as log-level`,
		"log-level: debug\n---\npids: 64":  `f.yaml:2:1: a second document begins; write all settings into one`,
		"pids: 64\n\tmemory: 1g":           `f.yaml:2:1: found a tab character that violates indentation`,
	} {
		_, err := Parse("f.yaml", []byte(text), testKinds)
		if err == nil || err.Error() != want {
			t.Errorf("%q:\n got %v\nwant %s", text, err, want)
		}
	}
	_, err := Parse("f.yaml", []byte("a: 1\nb: 2\n"), testKinds)
	if err == nil || strings.Count(err.Error(), "unknown setting") != 2 {
		t.Errorf("two mistakes are told as %v", err)
	}
}

func TestReadTrustsTheOwnerOnly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sandboxd.yaml")
	if _, err := Read(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
	if err := os.WriteFile(path, []byte("pids: 64\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for mode, want := range map[os.FileMode]string{0o600: "", 0o644: "", 0o664: "chmod go-w", 0o646: "chmod go-w"} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		_, err := Read(path)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("mode %o: %v, want %q", mode, err, want)
		}
	}
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(path, 12345, -1); err != nil {
			t.Fatal(err)
		}
		if _, err := Read(path); err == nil || !strings.Contains(err.Error(), "belongs to neither uid 0 nor root: chown 0") {
			t.Errorf("another user's: %v", err)
		}
	}
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, other := range []string{fifo, t.TempDir(), "/dev/null"} {
		if _, err := Read(other); err == nil || !strings.Contains(err.Error(), "no regular file") && !errors.Is(err, syscall.EISDIR) {
			t.Errorf("%s: %v", other, err)
		}
	}
	large := filepath.Join(t.TempDir(), "large")
	if err := os.WriteFile(large, make([]byte, maxFile+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(large); err == nil || !strings.Contains(err.Error(), "larger") {
		t.Errorf("large: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		"log-level: debug\npool: [a, b]\n", "a: &a [*a]", "pids: 1\npids: 2", "---\n---\n", "? [a]\n: b", "memory: !!binary aGk=", "%YAML 1.1\n---\n", "<<: {pids: 1}",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := Parse("f", data, testKinds)
		if err != nil && !strings.Contains(err.Error(), "f:") {
			t.Errorf("a mistake without a place: %v", err)
		}
		seen := make(map[string]bool)
		for _, s := range got {
			kind, known := testKinds[s.Name]
			if !known || seen[s.Name] || s.Place.Line < 1 || s.Place.Column < 1 || kind != List && len(s.Values) != 1 {
				t.Errorf("%q: %+v", data, s)
			}
			seen[s.Name] = true
		}
	})
}
