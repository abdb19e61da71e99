package service

import (
	"cmp"
	"maps"
	"net/netip"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/runtime"
)

// Bounds of settings.
const (
	maxHostname = 64 // the kernel's __NEW_UTS_LEN
	maxTmpfs    = 16
	maxHosts    = 256
	maxCaps     = 64

	maxAnnotations     = 256 << 10 // bytes of keys and values of one sandbox
	maxExecAnnotations = 4 << 10   // of one exec
	minMemoryFile      = 4096      // bytes; a page
	maxMemoryFile      = 1 << 40   // bytes of one file system in memory
	defaultTmpfs       = 64 << 20
	anyoneWrites       = 0o1777
)

// covered are the places that no file system in memory may hide, and below which there may be none:
// the sandbox's own mounts, and the files that hold /etc/hosts and the like.
var covered = []string{"/proc", "/sys", "/dev", "/etc"}

// The ceilings that every sandbox has on resource limits (runtime/libct). Others are the host's,
// and init refuses what exceeds them.
var rlimitCeilings = map[string]uint64{"fsize": 16 << 30, "memlock": 64 << 10, "nofile": 1 << 20}

// validateAnnotations checks the sizes of annotations; their meaning is the client's.
func validateAnnotations(all map[string]string, most int) error {
	if len(all) > maxLabels {
		return class.Invalidf("annotations: %d keys, at most %d are possible", len(all), maxLabels)
	}
	total := 0
	for k, v := range all {
		if k == "" || len(k) > maxLabelKey || hasControl(k) {
			return class.Invalidf("annotation %q: a key has 1 to %d characters, none of them a control character", class.Clip(k), maxLabelKey)
		}
		if !utf8.ValidString(v) {
			return class.Invalidf("annotation %q: the value is not UTF-8", k)
		}
		total += len(k) + len(v)
	}
	if total > most {
		return class.Invalidf("annotations: %d bytes, at most %d are possible", total, most)
	}
	return nil
}

// validateSettings checks settings, and fills in the defaults of Tmpfs.
func validateSettings(set *api.Settings) error {
	if h := set.Hostname; h != "" && (len(h) > maxHostname || !hostLike(h)) {
		return class.Invalidf("hostname %q: at most %d letters, digits, inner hyphens and dots", class.Clip(h), maxHostname)
	}
	if err := validateTmpfs(set.Tmpfs); err != nil {
		return err
	}
	if err := validateMounts(set, nil); err != nil {
		return err
	}
	if set.ShmSize != 0 && (set.ShmSize < minMemoryFile || set.ShmSize > maxMemoryFile) {
		return class.Invalidf("shm_size %d: must be 0 (the default) or between %d and %d bytes", set.ShmSize, minMemoryFile, int64(maxMemoryFile))
	}
	for _, name := range slices.Sorted(maps.Keys(set.Rlimits)) {
		if err := validateRlimit(name, set.Rlimits[name]); err != nil {
			return err
		}
	}
	if len(set.Hosts) > maxHosts {
		return class.Invalidf("hosts: %d lines, at most %d are possible", len(set.Hosts), maxHosts)
	}
	for i, h := range set.Hosts {
		if len(h.Name) > 253 || !hostLike(h.Name) {
			return class.Invalidf("hosts[%d].name %q: not the name of a host", i, class.Clip(h.Name))
		}
		if a, err := netip.ParseAddr(h.Address); err != nil || a.Zone() != "" {
			return class.Invalidf("hosts[%d].address %q: not an IP address", i, class.Clip(h.Address))
		}
	}
	if err := validateHealth(set.HealthCheck); err != nil {
		return err
	}
	if set.StopSignal != "" && runtime.SignalNumber(set.StopSignal) == 0 {
		return class.Invalidf("stop_signal %q: no such signal", class.Clip(set.StopSignal))
	}
	if set.AutoRemove && set.Restart != "" && set.Restart != restartNo {
		return class.Invalidf("auto_remove: it removes the sandbox at its end, and restart %q starts it again", class.Clip(set.Restart))
	}
	if _, err := parseRestart(set.Restart); err != nil {
		return err
	}
	if err := validateAnnotations(set.Annotations, maxAnnotations); err != nil {
		return err
	}
	if len(set.CapDrop) > maxCaps || len(set.CapAdd) > maxCaps {
		return class.Invalidf("cap_drop and cap_add: at most %d names are possible", maxCaps)
	}
	return nil
}

// hostLike reports whether a text consists of labels as in names of hosts; an underscore is
// allowed, as programs do.
func hostLike(name string) bool {
	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
		for _, c := range []byte(label) {
			alnum := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
			if !alnum && c != '-' && c != '_' {
				return false
			}
		}
	}
	return true
}

func validateTmpfs(list []api.Scratch) error {
	if len(list) > maxTmpfs {
		return class.Invalidf("tmpfs: %d, at most %d are possible", len(list), maxTmpfs)
	}
	for i := range list {
		m := &list[i]
		if err := validatePath("tmpfs", m.Path); err != nil {
			return err
		}
		if hasControl(m.Path) || path.Clean(m.Path) != m.Path || m.Path == "/" {
			return class.Invalidf("tmpfs %q: not a path in its shortest form below \"/\"", class.Clip(m.Path))
		}
		for _, at := range covered {
			if within(m.Path, at) {
				return class.Invalidf("tmpfs %q: %s is sandboxd's; what is there cannot be hidden", class.Clip(m.Path), at)
			}
		}
		for _, other := range list[:i] {
			if within(m.Path, other.Path) || within(other.Path, m.Path) {
				return class.Invalidf("tmpfs: %s and %s lie in one another", other.Path, m.Path)
			}
		}
		m.Size, m.Mode = cmp.Or(m.Size, defaultTmpfs), cmp.Or(m.Mode, anyoneWrites)
		switch {
		case m.Size < minMemoryFile || m.Size > maxMemoryFile:
			return class.Invalidf("tmpfs %s: size %d: must be 0 (64 MiB) or between %d and %d bytes", m.Path, m.Size, minMemoryFile, int64(maxMemoryFile))
		case m.Mode&^anyoneWrites != 0:
			return class.Invalidf("tmpfs %s: mode %o: must be 0 (1777) or permissions up to 1777", m.Path, m.Mode)
		case m.UID > maxID || m.GID > maxID:
			return class.Invalidf("tmpfs %s: the ids of a sandbox end at %d", m.Path, maxID)
		}
	}
	return nil
}

// within reports whether a path is a directory or lies below it.
func within(p, dir string) bool { return p == dir || strings.HasPrefix(p, dir+"/") }

func validateRlimit(name string, l api.Rlimit) error {
	if _, ok := rlimits[name]; !ok {
		return class.Invalidf("rlimits %q: must be one of %s", class.Clip(name), strings.Join(slices.Sorted(maps.Keys(rlimits)), ", "))
	}
	if l.Soft > l.Hard {
		return class.Invalidf("rlimits %s: the soft limit %d exceeds the hard one, %d", name, l.Soft, l.Hard)
	}
	if most, ok := rlimitCeilings[name]; ok && l.Hard > most {
		return class.Invalidf("rlimits %s: %d exceeds %d, the most that any sandbox has", name, l.Hard, most)
	}
	if name == "nofile" && l.Hard == 0 {
		return class.Invalidf("rlimits nofile: a program needs some descriptors")
	}
	return nil
}

// raiseNofile makes room for a hard limit of descriptors: no program gets more than its sandbox.
func raiseNofile(limits *api.Limits, usual, hard uint64) error {
	switch {
	case limits.Nofile != 0 && hard > limits.Nofile:
		return class.Invalidf("rlimits nofile: %d exceeds limits.nofile, %d", hard, limits.Nofile)
	case limits.Nofile == 0 && hard > usual:
		limits.Nofile = hard
	}
	return nil
}

// checkCapabilities refuses names that are no capabilities, and additions that the profile does not
// have.
func checkCapabilities(p *runtime.Profile, set *api.Settings) error {
	for _, c := range set.CapDrop {
		if !runtime.IsCapability(runtime.CapabilityName(c)) {
			return class.Invalidf("cap_drop %q: no such capability", class.Clip(c))
		}
	}
	for _, c := range set.CapAdd {
		switch name := runtime.CapabilityName(c); {
		case !runtime.IsCapability(name):
			return class.Invalidf("cap_add %q: no such capability", class.Clip(c))
		case name != runtime.AllCapabilities && !slices.Contains(p.Capabilities, name):
			return class.Invalidf("cap_add %s: profile %q does not have it, and no request gives a sandbox more than its profile; it would hold only inside the sandbox's own user namespace in any case. Leave it out, or use a profile that has it (sandboxd profiles)",
				name, p.Name)
		}
	}
	return nil
}
