package runtime

import (
	"slices"
	"testing"

	"github.com/sandboxd/sandboxd/api"
)

func TestSignalNumber(t *testing.T) {
	for name, want := range map[string]int{
		"SIGTERM": 15, "TERM": 15, "quit": 3, "SigInt": 2, "9": 9, "64": 64, "SIGRTMIN": 34, "RTMIN+3": 37, "SIGRTMIN+30": 64, "SIGRTMAX-1": 63, "rtmax": 64,
		"": 0, "0": 0, "65": 0, "-1": 0, "015": 0, "SIG": 0, "SIGNOPE": 0, "SIGRTMIN+31": 0, "SIGRTMIN-1": 0, "SIGRTMAX+1": 0, "SIGRTMIN3": 0, "SIGRTMIN+": 0, "SIGRTMIN+-1": 0,
	} {
		if got := SignalNumber(name); got != want {
			t.Errorf("%q is %d, want %d", name, got, want)
		}
	}
}

// Settings take capabilities away and never add one.
func TestSettingsNeverAddCapabilities(t *testing.T) {
	profile := []string{"CAP_CHOWN", "CAP_KILL", "CAP_NET_RAW"}
	for _, tt := range []struct{ drop, add, want []string }{
		{nil, nil, profile},
		{nil, []string{"ALL"}, profile},
		{nil, []string{"SYS_ADMIN"}, profile},
		{[]string{"ALL"}, nil, []string{}},
		{[]string{"all"}, []string{"chown", "CAP_KILL"}, []string{"CAP_CHOWN", "CAP_KILL"}},
		{[]string{"ALL"}, []string{"SYS_ADMIN"}, []string{}},
		{[]string{"ALL", "KILL"}, []string{"ALL"}, []string{"CAP_CHOWN", "CAP_NET_RAW"}},
		{[]string{"CAP_NET_RAW", "SYS_ADMIN"}, nil, []string{"CAP_CHOWN", "CAP_KILL"}},
		{[]string{"NET_RAW"}, []string{"NET_RAW"}, profile},
	} {
		s := Spec{Profile: Profile{Capabilities: slices.Clone(profile)}}
		s.set(&api.Settings{CapDrop: tt.drop, CapAdd: tt.add})
		if !slices.Equal(s.Profile.Capabilities, tt.want) {
			t.Errorf("-%v +%v: %v, want %v", tt.drop, tt.add, s.Profile.Capabilities, tt.want)
		}
	}
}

// A profile's restrictions stay, whatever the settings leave out.
func TestSettingsKeepReadOnlyRoots(t *testing.T) {
	for _, profile := range []bool{false, true} {
		for _, asked := range []bool{false, true} {
			s := Spec{Hostname: "name", Profile: Profile{ReadOnlyRoot: profile}}
			s.set(&api.Settings{ReadOnly: asked})
			if s.Profile.ReadOnlyRoot != (profile || asked) || s.Hostname != "name" || s.StopSignal != 0 {
				t.Errorf("profile %v, asked %v: %+v", profile, asked, s)
			}
		}
	}
}
