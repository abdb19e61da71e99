package runtime

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
)

// set applies the settings of a request or a record to a spec with the profile and name of the
// sandbox. It is pure. Restrictions of the profile can become tighter, never wider.
func (s *Spec) set(by *api.Settings) {
	s.Hostname = cmp.Or(by.Hostname, s.Hostname)
	s.Profile.ReadOnlyRoot = s.Profile.ReadOnlyRoot || by.ReadOnly
	s.Profile.Capabilities = capabilitiesOf(s.Profile.Capabilities, by)
	s.Tmpfs, s.ShmSize, s.Hosts, s.Mounts = by.Tmpfs, by.ShmSize, by.Hosts, nil
	for _, m := range by.Mounts {
		if m.Type != api.MountVolume { // volumes are looked up by who starts the sandbox
			s.Mounts = append(s.Mounts, m)
		}
	}
	s.StopSignal = SignalNumber(by.StopSignal)
	if s.StopSignal == int(unix.SIGTERM) {
		s.StopSignal = 0
	}
	s.Workspace = workspaceOf(by.Workspace)
}

// knownCapabilities are all of Linux, without CAP_.
const knownCapabilities = " CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE" +
	" NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE" +
	" SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM" +
	" BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE "

// IsCapability reports whether a full name is that of a capability of Linux, or [AllCapabilities].
func IsCapability(name string) bool {
	short, _ := strings.CutPrefix(name, "CAP_")
	return name == AllCapabilities || short != "" && !strings.Contains(short, " ") && strings.Contains(knownCapabilities, " "+short+" ")
}

// AllCapabilities is the name of all capabilities of a profile in [api.Settings].
const AllCapabilities = "CAP_ALL"

// CapabilityName returns the full name of a capability: "CAP_CHOWN" for "chown".
func CapabilityName(name string) string {
	name = strings.ToUpper(name)
	if !strings.HasPrefix(name, "CAP_") {
		name = "CAP_" + name
	}
	return name
}

// capabilitiesOf returns those capabilities of a profile that the settings leave: never one that
// the profile does not have.
func capabilitiesOf(profile []string, by *api.Settings) []string {
	if len(by.CapDrop) == 0 {
		return profile
	}
	named := func(list []string, name string) bool {
		return slices.ContainsFunc(list, func(c string) bool { return CapabilityName(c) == name })
	}
	dropAll, addAll := named(by.CapDrop, AllCapabilities), named(by.CapAdd, AllCapabilities)
	left := []string{}
	for _, c := range profile {
		if named(by.CapAdd, c) || !dropAll && !named(by.CapDrop, c) || addAll && !named(by.CapDrop, c) {
			left = append(left, c)
		}
	}
	return left
}

// The kernel's highest signal, and the first real-time signal that the C libraries leave to
// programs.
const (
	maxSignal  = 64
	firstRTMin = 34
)

// SignalNumber returns the number of a signal by its name, with or without SIG, or by its number,
// as images write it: "SIGQUIT", "QUIT", "3", "SIGRTMIN+3". It returns 0 if there is none.
func SignalNumber(name string) int {
	if n, err := strconv.Atoi(name); err == nil {
		if n < 1 || n > maxSignal || strconv.Itoa(n) != name {
			return 0
		}
		return n
	}
	name = strings.TrimPrefix(strings.ToUpper(name), "SIG")
	for _, from := range []struct {
		name, sign string
		number     int
		step       int
	}{{"RTMIN", "+", firstRTMin, 1}, {"RTMAX", "-", maxSignal, -1}} {
		switch rest, ok := strings.CutPrefix(name, from.name); {
		case !ok:
			continue
		case rest == "":
			return from.number
		default:
			digits, _ := strings.CutPrefix(rest, from.sign)
			n, err := strconv.ParseUint(digits, 10, 8)
			if err != nil || digits == rest || n > maxSignal-firstRTMin {
				return 0
			}
			return from.number + from.step*int(n)
		}
	}
	return int(unix.SignalNum("SIG" + name))
}
