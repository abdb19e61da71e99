package build

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// mountsOf returns the mounts of the last RUN of a Dockerfile.
func mountsOf(t *testing.T, run string) ([]Mount, error) {
	t.Helper()
	f, err := Parse("Dockerfile", []byte("FROM a AS one\nFROM b\nARG V=v1\nWORKDIR /work\n"+run+"\n"))
	if err != nil {
		return nil, err
	}
	plan, err := f.Plan(t.Context(), Options{Platform: Platform{OS: "linux", Architecture: "amd64"}})
	if err != nil {
		return nil, err
	}
	var last []Mount
	for _, stage := range plan.Stages {
		steps, _, err := stage.Evaluate(t.Context(), &Image{})
		if err != nil {
			return nil, err
		}
		for _, s := range steps {
			if s.Run != nil {
				last = s.Run.Mounts
			}
		}
	}
	return last, nil
}

// Mounts have the defaults that BuildKit gives them.
func TestMountsOfRun(t *testing.T) {
	for options, want := range map[string]Mount{
		"target=.": {Type: MountBind, Target: "/work", ReadOnly: true},
		"type=bind,from=one,source=/x,target=y/,rw": {Type: MountBind, From: "one", Source: "/x", Target: "/work/y"},
		"type=bind,from=img:1,target=/y":            {Type: MountBind, From: "img:1", Image: "img:1", Target: "/y", ReadOnly: true},
		"type=cache,target=/root/.cache":            {Type: MountCache, Target: "/root/.cache", ID: "/root/.cache", Sharing: ShareShared, Mode: 0o755},
		"type=cache,target=/c/$V,id=i,sharing=locked,uid=5,gid=6,mode=0700": {
			Type: MountCache, Target: "/c/v1", ID: "i", Sharing: ShareLocked, Mode: 0o700, UID: 5, GID: 6,
		},
		"type=secret,id=s":                              {Type: MountSecret, ID: "s", Target: "/run/secrets/s", Mode: 0o400},
		"type=secret,target=/root/.npmrc,required":      {Type: MountSecret, ID: ".npmrc", Target: "/root/.npmrc", Mode: 0o400, Required: true},
		"type=secret,id=s,env=TOKEN":                    {Type: MountSecret, ID: "s", Env: "TOKEN", Mode: 0o400},
		"type=secret,id=s,env=TOKEN,target=/t,mode=440": {Type: MountSecret, ID: "s", Env: "TOKEN", Target: "/t", Mode: 0o440},
		"type=tmpfs,target=/t,size=64m":                 {Type: MountTmpfs, Target: "/t", Size: 64 << 20},
	} {
		got, err := mountsOf(t, "RUN --mount="+options+" x")
		if diff := cmp.Diff([]Mount{want}, got, cmpopts.IgnoreFields(Mount{}, "Stage")); err != nil || diff != "" {
			t.Errorf("%s: %v (-want +got):\n%s", options, err, diff)
		}
		if err == nil && (got[0].Stage != nil) != (want.From == "one") {
			t.Errorf("%s: stage %v", options, got[0].Stage)
		}
	}
}

func TestMountsThatAreRefused(t *testing.T) {
	for options, want := range map[string]string{
		"type=cache":                                          "the target is missing",
		"type=bind":                                           "the target is missing",
		"type=tmpfs":                                          "the target is missing",
		"type=cache,target=/c,from=one":                       "begins empty",
		"type=bind,target=/":                                  "root directory",
		"type=bind,target=../..":                              "root directory",
		"type=cache,target=/proc/x":                           "/proc is sandboxd's",
		"type=cache,target=/dev":                              "/dev is sandboxd's",
		"type=cache,target=/etc":                              "files of sandboxd",
		"type=cache,target=/c,mode=4755":                      "mode 4755",
		"type=cache,target=/c,uid=70000":                      "end at 65535",
		"type=tmpfs,target=/c,size=1":                         "size 1",
		"type=secret,id=s,env=A=B":                            "not the name of a variable",
		"type=bind,from=scratch,target=/x":                    "nothing in it",
		"type=bind,from=9,target=/x":                          "no stage before this one",
		"type=secret,id=" + strings.Repeat("x", 300):          "at most 255 bytes",
		"type=cache,target=/a --mount=type=tmpfs,target=/a":   "two mounts at /a",
		"type=cache,target=/a --mount=type=cache,target=/a/b": "lies in the cache at /a",
		"type=bind,target=/a --mount=type=tmpfs,target=/a/b":  "lies in the bind at /a",
		"type=ssh": "type=ssh is not supported",
	} {
		if got, err := mountsOf(t, "RUN --mount="+options+" x"); err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "Dockerfile:5: ") {
			t.Errorf("%.60s: %+v, %v, want %q", options, got, err, want)
		}
	}
}
