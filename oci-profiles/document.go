package ociprofiles

import (
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/seccomp"
)

// document is NAME.json. Fields named as in the OCI runtime specification mean the same here;
// profiles do not set the rest of it.
type document struct {
	Name        string `json:"name"`
	Description string `json:"description"`
	// Seccomp names the embedded profile whose filter this one has; empty: it has one of its own.
	Seccomp string  `json:"seccomp,omitempty"`
	Process process `json:"process"`
	Root    struct {
		Readonly bool `json:"readonly"`
	} `json:"root"`
	Mounts []mount `json:"mounts"`
	Linux  struct {
		MaskedPaths   []string `json:"maskedPaths"`
		ReadonlyPaths []string `json:"readonlyPaths"`
	} `json:"linux"`
	Limits api.Limits `json:"limits"`
}

type process struct {
	// User is given by profiles under which nothing runs as root.
	User *struct {
		UID uint32 `json:"uid"`
		GID uint32 `json:"gid"`
	} `json:"user,omitempty"`
	Cwd          string   `json:"cwd,omitempty"`
	Env          []string `json:"env,omitempty"`
	Capabilities struct {
		Bounding []string `json:"bounding"`
	} `json:"capabilities"`
}

type mount struct {
	Destination string   `json:"destination"`
	Type        string   `json:"type"`
	Source      string   `json:"source,omitempty"`
	Options     []string `json:"options"`
}

// grantable are the capabilities that a profile may have: those of Docker's default. Others reach,
// inside a user namespace, the kernel code that most published escapes went through, or the
// sandbox's init.
var grantable = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD", "CAP_NET_BIND_SERVICE",
	"CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

// never are paths that every profile masks or makes read-only: they are the host's. In a writable
// /proc every program could lower its oom_score_adj, so that the kernel ends those of other
// sandboxes in its place.
var never = struct{ masked, readonly []string }{
	masked:   []string{"/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"},
	readonly: []string{"/proc"},
}

// maxID is the last id of a sandbox.
const maxID = 65535

func checkName(name string) error {
	if name == "" || len(name) > 63 || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" || name[0] == '-' {
		return errors.New("a profile's name is made of lower-case letters, digits and \"-\", 63 of them at most")
	}
	return nil
}

// resolve checks a document.
func (d *document) resolve(name string) (Profile, error) {
	p := Profile{Description: d.Description, Limits: d.Limits}
	p.Name = d.Name
	if d.Name != name {
		return p, fmt.Errorf("name %q: the file's is %q", d.Name, name)
	}
	if d.Description == "" || strings.ContainsFunc(d.Description, func(r rune) bool { return r < ' ' }) {
		return p, errors.New("description: one line that says whom the profile is for")
	}
	if err := sortedSet("process.capabilities.bounding", d.Process.Capabilities.Bounding); err != nil {
		return p, err
	}
	for _, c := range d.Process.Capabilities.Bounding {
		if !slices.Contains(grantable, c) {
			return p, fmt.Errorf("process.capabilities.bounding: %q: a profile may have %s", c, strings.Join(grantable, ", "))
		}
	}
	p.Capabilities = d.Process.Capabilities.Bounding
	if p.Capabilities == nil {
		p.Capabilities = []string{}
	}
	if u := d.Process.User; u != nil {
		if u.UID == 0 || u.UID > maxID || u.GID == 0 || u.GID > maxID {
			return p, fmt.Errorf("process.user: uid and gid are 1 to %d; a profile that allows root names none", maxID)
		}
		p.NonRoot, p.User = true, strconv.Itoa(int(u.UID))+":"+strconv.Itoa(int(u.GID))
		if len(p.Capabilities) > 0 {
			return p, errors.New("process.user: a profile without root has no capabilities either: no process would have them")
		}
	}
	if p.Cwd = d.Process.Cwd; p.Cwd != "" && !plainPath(p.Cwd) {
		return p, fmt.Errorf("process.cwd %q: not an absolute path in its shortest form", p.Cwd)
	}
	for _, e := range d.Process.Env {
		if k, _, ok := strings.Cut(e, "="); !ok || k == "" || strings.IndexByte(e, 0) >= 0 {
			return p, fmt.Errorf("process.env %q: not NAME=VALUE", e)
		}
	}
	p.Env, p.ReadOnlyRoot = d.Process.Env, d.Root.Readonly
	for i := range d.Mounts {
		m, err := d.Mounts[i].resolve()
		if err != nil {
			return p, fmt.Errorf("mounts[%d]: %w", i, err)
		}
		for _, other := range p.Mounts {
			if m.Path == other.Path || strings.HasPrefix(m.Path, other.Path+"/") || strings.HasPrefix(other.Path, m.Path+"/") {
				return p, fmt.Errorf("mounts[%d]: %s and %s lie in one another", i, other.Path, m.Path)
			}
		}
		p.Mounts = append(p.Mounts, m)
	}
	return p, errors.Join(d.paths(&p), d.limits())
}

func (d *document) paths(p *Profile) error {
	p.MaskedPaths, p.ReadonlyPaths = d.Linux.MaskedPaths, d.Linux.ReadonlyPaths
	for _, list := range []struct {
		name         string
		paths, never []string
	}{{"linux.maskedPaths", p.MaskedPaths, never.masked}, {"linux.readonlyPaths", p.ReadonlyPaths, never.readonly}} {
		if err := sortedSet(list.name, list.paths); err != nil {
			return err
		}
		for _, path := range list.paths {
			if !plainPath(path) || !slices.Contains(list.never, path) && !strings.HasPrefix(path, "/proc/") && !strings.HasPrefix(path, "/sys/") {
				return fmt.Errorf("%s: %q: not a path below /proc or /sys in its shortest form", list.name, path)
			}
		}
		for _, path := range list.never {
			if !slices.Contains(list.paths, path) {
				return fmt.Errorf("%s: %s is missing: every profile has it", list.name, path)
			}
		}
	}
	return nil
}

func (d *document) limits() error {
	l := d.Limits
	if l.Memory <= 0 || l.Pids <= 0 || l.Nofile == 0 || l.Swap == nil {
		return errors.New("limits: memory, swap, pids and nofile are needed: a profile leaves none of them open")
	}
	return l.Check()
}

// resolve takes the one kind of mount that a profile may have: a file system in memory, of a stated
// size.
func (m *mount) resolve() (api.Scratch, error) {
	s := api.Scratch{Path: m.Destination, Mode: 0o755}
	if m.Type != "tmpfs" || m.Source != "" && m.Source != "tmpfs" {
		return s, fmt.Errorf("type %q, source %q: a profile mounts tmpfs only", m.Type, m.Source)
	}
	if !plainPath(s.Path) || s.Path == "/" {
		return s, fmt.Errorf("destination %q: not an absolute path in its shortest form", s.Path)
	}
	for _, taken := range []string{"/proc", "/sys", "/dev", "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc"} {
		if s.Path == taken || strings.HasPrefix(s.Path, taken+"/") {
			return s, fmt.Errorf("destination %q: %s is not a profile's to cover", s.Path, taken)
		}
	}
	var nosuid, nodev bool
	for _, o := range m.Options {
		name, value, _ := strings.Cut(o, "=")
		base, bits := 10, 63
		if name == "mode" {
			base, bits = 8, 12
		}
		var n uint64
		if value != "" {
			var err error
			if n, err = strconv.ParseUint(value, base, bits); err != nil {
				return s, fmt.Errorf("option %q: not a number", o)
			}
		}
		switch {
		case o == "nosuid":
			nosuid = true
		case o == "nodev":
			nodev = true
		case name == "size" && n > 0:
			s.Size = int64(n)
		case name == "mode" && n > 0 && n&^0o1777 == 0:
			s.Mode = uint32(n)
		case name == "uid" && value != "" && n <= maxID:
			s.UID = uint32(n)
		case name == "gid" && value != "" && n <= maxID:
			s.GID = uint32(n)
		default:
			return s, fmt.Errorf("option %q: there are nosuid, nodev, size=BYTES, mode=OCTAL, uid=N and gid=N", o)
		}
	}
	if !nosuid || !nodev || s.Size == 0 {
		return s, errors.New("options: nosuid, nodev and a size are needed")
	}
	return s, nil
}

func plainPath(p string) bool {
	return path.IsAbs(p) && path.Clean(p) == p && strings.IndexByte(p, 0) < 0 && len(p) < 4096
}

func sortedSet(what string, list []string) error {
	if !slices.IsSorted(list) || len(slices.Compact(slices.Clone(list))) != len(list) {
		return fmt.Errorf("%s: not sorted, or something is in it twice", what)
	}
	return nil
}

// API is the profile as it is shown to clients. With the filter it is some 40 KB.
func (p *Profile) API() (api.Profile, error) {
	filter, err := json.Marshal(p.Seccomp)
	if err != nil {
		return api.Profile{}, fmt.Errorf("profile %q: encode its filter: %w", p.Name, err)
	}
	return api.Profile{
		Name: p.Name, Description: p.Description, Source: p.Source, Capabilities: p.Capabilities, NonRoot: p.NonRoot, User: p.User,
		Cwd: p.Cwd, Env: p.Env, ReadOnlyRoot: p.ReadOnlyRoot, Mounts: p.Mounts, MaskedPaths: p.MaskedPaths, ReadonlyPaths: p.ReadonlyPaths,
		Limits: p.Limits, Syscalls: len(seccomp.Reachable(p.Seccomp)), Seccomp: filter,
	}, nil
}
