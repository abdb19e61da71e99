package cli

import (
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
)

func TestTmpfsFlag(t *testing.T) {
	for text, want := range map[string]api.Scratch{
		"/tmp":                         {Path: "/tmp", NoExec: true},
		"/run:size=8m,mode=755":        {Path: "/run", NoExec: true, Size: 8 << 20, Mode: 0o755},
		"/w:rw,nosuid,nodev,exec":      {Path: "/w"},
		"/w:exec,noexec,uid=7,gid=8":   {Path: "/w", NoExec: true, UID: 7, GID: 8},
		"/w:size=65536k,mode=1777":     {Path: "/w", NoExec: true, Size: 64 << 20, Mode: 0o1777},
		"/relative/../is/the/daemon's": {Path: "/relative/../is/the/daemon's", NoExec: true},
	} {
		got, err := parseTmpfs(text)
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%s: %v %s", text, err, diff)
		}
	}
	for _, text := range []string{"", ":size=1m", "/t:size=50%", "/t:size=0", "/t:size=-1", "/t:mode=9", "/t:mode=77777", "/t:uid=65536", "/t:ro", "/t:nr_inodes=5", "/t:other", "/t:"} {
		if got, err := parseTmpfs(text); err == nil {
			t.Errorf("%q: %+v", text, got)
		}
	}
}

func TestUlimitFlag(t *testing.T) {
	for text, want := range map[string]api.Rlimit{
		"nofile=1024":            {Soft: 1024, Hard: 1024},
		"nofile=1024:4096":       {Soft: 1024, Hard: 4096},
		"core=0:-1":              {Soft: 0, Hard: math.MaxUint64},
		"cpu=unlimited":          {Soft: math.MaxUint64, Hard: math.MaxUint64},
		"anything=1:18446744073": {Soft: 1, Hard: 18446744073},
	} {
		name, got, err := parseUlimit(text)
		if err != nil || got != want || !strings.HasPrefix(text, name+"=") {
			t.Errorf("%s: %s %+v %v", text, name, got, err)
		}
	}
	for _, text := range []string{"", "nofile", "=5", "nofile=", "nofile=a", "nofile=5:", "nofile=5:4", "nofile=-1:5", "nofile=-2", "nofile=1:2:3"} {
		if _, got, err := parseUlimit(text); err == nil {
			t.Errorf("%q: %+v", text, got)
		}
	}
}

func TestAddHostFlag(t *testing.T) {
	for text, want := range map[string]api.HostAddress{
		"db:10.0.0.2":   {Name: "db", Address: "10.0.0.2"},
		"db=10.0.0.2":   {Name: "db", Address: "10.0.0.2"},
		"six:::1":       {Name: "six", Address: "::1"},
		"six=[fd00::2]": {Name: "six", Address: "fd00::2"},
	} {
		if got, err := parseHost(text); err != nil || got != want {
			t.Errorf("%s: %+v %v", text, got, err)
		}
	}
	for _, text := range []string{"", "db", ":10.0.0.2", "db:", "db:other", "db:fe80::1%eth0", "db:host-gateway"} {
		if got, err := parseHost(text); err == nil {
			t.Errorf("%q: %+v", text, got)
		}
	}
}

func TestEnvFile(t *testing.T) {
	got, err := parseEnvFile(strings.NewReader("\ufeff# a comment\n\n  A=1\nB='two words' # not a comment\nC=\nFROM_HERE\n\t#x\nD=a=b\r\n"))
	want := []string{"A=1", "B='two words' # not a comment", "C=", "FROM_HERE", "D=a=b"}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v %s", err, diff)
	}
	for _, text := range []string{"=x", "A=1\nB C=2", "A=\xff", strings.Repeat("x", maxEnvFile+1)} {
		if got, err := parseEnvFile(strings.NewReader(text)); err == nil {
			t.Errorf("%.20q: %.20q", text, got)
		}
	}
	if _, err := parseEnvFile(strings.NewReader("S\xff=secret value")); err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("%v", err)
	}
}

func FuzzSettingFlags(f *testing.F) {
	for _, text := range []string{"/tmp:size=8m,mode=755", "nofile=1:2", "db:10.0.0.2", "six=[::1]", "A=1\n#x\nB"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if m, err := parseTmpfs(text); err == nil && (m.Path == "" || m.Size < 0 || m.Mode > 0o7777 || m.UID > 65535 || m.GID > 65535) {
			t.Errorf("%+v", m)
		}
		if _, l, err := parseUlimit(text); err == nil && l.Soft > l.Hard {
			t.Errorf("%+v", l)
		}
		if h, err := parseHost(text); err == nil && (h.Name == "" || h.Address == "") {
			t.Errorf("%+v", h)
		}
		lines, err := parseEnvFile(strings.NewReader(text))
		for _, l := range lines {
			if err == nil && (l == "" || l[0] == '=' || strings.ContainsAny(l, "\n")) {
				t.Errorf("%q", l)
			}
		}
	})
}
