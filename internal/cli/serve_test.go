package cli

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/internal/boot"
	"github.com/sandboxd/sandboxd/internal/dirs"
)

func TestServeOptions(t *testing.T) {
	usual := func() (dirs.Dirs, error) { return dirs.Dirs{Data: "/data", Runtime: "/rt"}, nil }
	homeless := func() (dirs.Dirs, error) { return dirs.Dirs{}, errors.New("no home") }
	tests := []struct {
		name  string
		opts  boot.Options
		pools []string
		env   string
		find  func() (dirs.Dirs, error)
		want  boot.Options
		err   string
	}{
		{name: "nothing", want: boot.Options{DataDir: "/data", RuntimeDir: "/rt", Socket: "/rt/api.sock"}},
		{name: "the environment's socket", env: "/e.sock", want: boot.Options{DataDir: "/data", RuntimeDir: "/rt", Socket: "/e.sock"}},
		{name: "the flag beats it", opts: boot.Options{Socket: "/f.sock"}, env: "/e.sock", want: boot.Options{DataDir: "/data", RuntimeDir: "/rt", Socket: "/f.sock"}},
		{name: "so does another runtime directory", opts: boot.Options{RuntimeDir: "/other"}, env: "/e.sock", want: boot.Options{DataDir: "/data", RuntimeDir: "/other", Socket: "/other/api.sock"}},
		{name: "data directory", opts: boot.Options{DataDir: "/d/../e"}, want: boot.Options{DataDir: "/e", RuntimeDir: "/rt", Socket: "/rt/api.sock"}},
		{name: "no home", find: homeless, err: "no home"},
		{name: "no home needed", opts: boot.Options{DataDir: "/d"}, find: homeless, want: boot.Options{DataDir: "/d", RuntimeDir: "/d/run", Socket: "/d/run/api.sock"}},
		{
			name: "required", opts: boot.Options{Require: []string{"cgroup", " subids "}},
			want: boot.Options{DataDir: "/data", RuntimeDir: "/rt", Socket: "/rt/api.sock", Require: []string{"cgroup", "subids"}},
		},
		{
			name: "a file of certificates", opts: boot.Options{RegistryCAs: []string{"/a/../ca.pem"}},
			want: boot.Options{DataDir: "/data", RuntimeDir: "/rt", Socket: "/rt/api.sock", RegistryCAs: []string{"/ca.pem"}},
		},
		{name: "required nothing", opts: boot.Options{Require: []string{""}}, err: "--require"},
		{name: "no end", opts: boot.Options{DefaultTimeout: -1}, err: "--default-timeout"},
		{name: "pool without a size", pools: []string{"host"}, err: "--pool"},
		{name: "pool of none", pools: []string{"host=0"}, err: "--pool"},
		{name: "pool without an image", pools: []string{"=3"}, err: "--pool"},
		{name: "pool too large", pools: []string{"host=101"}, err: "--pool"},
		{name: "pool of none, learned", pools: []string{"host=auto:0"}, err: "--pool"},
		{name: "pool that is not quite learned", pools: []string{"host=auto5"}, err: "--pool"},
		{name: "pool learned and not", pools: []string{"host=1", "host=auto"}, err: "twice"},
		{name: "pool named twice", pools: []string{"host=1", "host=2"}, err: "twice"},
		{
			name: "input of agent runs", opts: boot.Options{AgentInputs: []string{"/proc/../usr"}},
			want: boot.Options{DataDir: "/data", RuntimeDir: "/rt", Socket: "/rt/api.sock", AgentInputs: []string{"/usr"}},
		},
		{name: "input that is not there", opts: boot.Options{AgentInputs: []string{"/no/such"}}, err: "--agent-inputs"},
		{name: "input that is a file", opts: boot.Options{AgentInputs: []string{"/dev/null"}}, err: "not a directory"},
		{name: "all there is as input", opts: boot.Options{AgentInputs: []string{"/usr/.."}}, err: "that is all there is"},
		{name: "idle backwards", opts: boot.Options{IdleExit: -1}, err: "--idle-exit"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for _, o := range []*boot.Options{&tt.opts, &tt.want} {
				if o.DefaultTimeout == 0 {
					o.DefaultTimeout = time.Hour
				}
				o.DefaultIdleTimeout = time.Minute
			}
			find := tt.find
			if find == nil {
				find = usual
			}
			got, err := serveOptions{Options: tt.opts, pools: tt.pools}.complete(tt.env, find)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Fatalf("error %v, want one that mentions %q", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("options (-want +got):\n%s", diff)
			}
		})
	}
}

func TestUnpackLimits(t *testing.T) {
	limits := unpackLimits(layer.DefaultLimits())
	want := limits
	want.Bytes, want.Entries, want.Depth, want.Ratio = 100<<30, 5, layer.MaxDepth, 9
	for _, text := range []string{"bytes=100g,entries=7", "entries=5,depth=2048", "ratio=9"} {
		if err := limits.Set(text); err != nil {
			t.Error(err)
		}
	}
	if diff := cmp.Diff(want, limits); diff != "" {
		t.Errorf("limits (-want +got):\n%s", diff)
	}
	if err := limits.Set(limits.String()); err != nil || limits != want {
		t.Errorf("%s is not read back: %v", &limits, err)
	}
	for _, text := range []string{
		"", "bytes", "bytes=", "bytes=0", "bytes=-1", "bytes=x", "entries=0", "entries=1g", "entries=9223372036854775808", "ratio=0", "ratio=-1",
		"depth=0", "depth=2049", "depth=9223372036854775807", "name=3", "bytes=1,", "limit of bytes=1",
	} {
		if err := limits.Set(text); err == nil {
			t.Errorf("%q is taken: %s", text, &limits)
		}
	}
}

func TestPools(t *testing.T) {
	for text, want := range map[string]boot.Pool{
		"host=4":                  {Image: "host", Profile: "default", Size: 4},
		"host=auto":               {Image: "host", Profile: "default", Size: learnedPool, Learn: true},
		"host=2,network":          {Image: "host", Profile: "default", Network: true, Size: 2},
		"host=2,hardened,network": {Image: "host", Profile: "hardened", Network: true, Size: 2},
		"host=1,hardened,network,context=python+a.b+c": {Image: "host", Profile: "hardened", Network: true, Size: 1, Context: "python+a.b+c"},
		"example.org/a=b:1=2,context=r":                {Image: "example.org/a=b:1", Profile: "default", Size: 2, Context: "r"},
		"host=auto:3,hardened":                         {Image: "host", Profile: "hardened", Size: 3, Learn: true},
		"example.org:5000/a=b:1=auto":                  {Image: "example.org:5000/a=b:1", Profile: "default", Size: learnedPool, Learn: true},
	} {
		if got, err := parsePool(text); err != nil || got != want {
			t.Errorf("%s: %+v, %v, want %+v", text, got, err, want)
		}
	}
}
