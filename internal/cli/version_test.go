package cli

import (
	"runtime/debug"
	"testing"
)

// No build says (devel).
func TestBuildVersion(t *testing.T) {
	stamp := []debug.BuildSetting{{Key: "vcs.revision", Value: "0123456789abcdef0123"}, {Key: "vcs.modified", Value: "true"}}
	for _, tc := range []struct {
		linked, module string
		settings       []debug.BuildSetting
		want           string
	}{
		{"v1.2-3-gabc", "v0.9.0", stamp, "v1.2-3-gabc"},
		{"unknown", "v0.9.0", stamp, "v0.9.0"},
		{"unknown", "(devel)", stamp, "0123456789ab-dirty"},
		{"", "", stamp[:1], "0123456789ab"},
		{"unknown", "(devel)", nil, "unknown"},
	} {
		info := &debug.BuildInfo{Main: debug.Module{Version: tc.module}, Settings: tc.settings}
		if got := buildVersion(tc.linked, info); got != tc.want {
			t.Errorf("%+v: %q", tc, got)
		}
	}
}
