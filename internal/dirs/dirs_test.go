package dirs_test

import (
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/internal/dirs"
)

func TestFind(t *testing.T) {
	tests := []struct {
		name   string
		uid    int
		env    map[string]string
		owners map[string]int
		want   dirs.Dirs
		err    string
	}{
		{
			name: "root has fixed places, whatever the environment says",
			uid:  0,
			env:  map[string]string{"HOME": "/home/u", "XDG_DATA_HOME": "/home/u/data", "XDG_RUNTIME_DIR": "/run/user/1000"},
			want: dirs.Dirs{Data: "/var/lib/sandboxd", Runtime: "/run/sandboxd"},
		},
		{
			name:   "a user with a session",
			uid:    1000,
			env:    map[string]string{"HOME": "/home/u", "XDG_RUNTIME_DIR": "/run/user/1000"},
			owners: map[string]int{"/run/user/1000": 1000},
			want:   dirs.Dirs{Data: "/home/u/.local/share/sandboxd", Runtime: "/run/user/1000/sandboxd"},
		},
		{
			name:   "XDG_DATA_HOME and a runtime directory elsewhere",
			uid:    1000,
			env:    map[string]string{"HOME": "/home/u", "XDG_DATA_HOME": "/data/u/", "XDG_RUNTIME_DIR": "/tmp/rt"},
			owners: map[string]int{"/tmp/rt": 1000, "/run/user/1000": 1000},
			want:   dirs.Dirs{Data: "/data/u/sandboxd", Runtime: "/tmp/rt/sandboxd"},
		},
		{
			name:   "no XDG_RUNTIME_DIR, but logind made one",
			uid:    1000,
			env:    map[string]string{"HOME": "/home/u"},
			owners: map[string]int{"/run/user/1000": 1000},
			want:   dirs.Dirs{Data: "/home/u/.local/share/sandboxd", Runtime: "/run/user/1000/sandboxd"},
		},
		{
			name:   "XDG_RUNTIME_DIR of another user (su)",
			uid:    1001,
			env:    map[string]string{"HOME": "/home/v", "XDG_RUNTIME_DIR": "/run/user/1000"},
			owners: map[string]int{"/run/user/1000": 1000},
			want:   dirs.Dirs{Data: "/home/v/.local/share/sandboxd", Runtime: "/home/v/.local/share/sandboxd/run"},
		},
		{
			name: "XDG_RUNTIME_DIR that does not exist",
			uid:  1000,
			env:  map[string]string{"HOME": "/home/u", "XDG_RUNTIME_DIR": "/run/user/1000"},
			want: dirs.Dirs{Data: "/home/u/.local/share/sandboxd", Runtime: "/home/u/.local/share/sandboxd/run"},
		},
		{
			name:   "relative variables are ignored",
			uid:    1000,
			env:    map[string]string{"HOME": "/home/u", "XDG_DATA_HOME": "data", "XDG_RUNTIME_DIR": "rt"},
			owners: map[string]int{"rt": 1000},
			want:   dirs.Dirs{Data: "/home/u/.local/share/sandboxd", Runtime: "/home/u/.local/share/sandboxd/run"},
		},
		{name: "no home at all", uid: 1000, err: "HOME"},
		{name: "relative home", uid: 1000, env: map[string]string{"HOME": "u"}, err: "HOME"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := dirs.Find(dirs.Host{
				UID:    tt.uid,
				Getenv: func(k string) string { return tt.env[k] },
				Owner: func(dir string) (int, error) {
					if uid, ok := tt.owners[dir]; ok {
						return uid, nil
					}
					return 0, fs.ErrNotExist
				},
			})
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
				t.Errorf("directories (-want +got):\n%s", diff)
			}
		})
	}
}

func TestConfigFiles(t *testing.T) {
	for _, tc := range []struct {
		name string
		uid  int
		env  map[string]string
		own  string
	}{
		{"root", 0, map[string]string{"HOME": "/root", "XDG_CONFIG_HOME": "/home/u/.config"}, ""},
		{"XDG", 1000, map[string]string{"HOME": "/home/u", "XDG_CONFIG_HOME": "/c"}, "/c/sandboxd/sandboxd.yaml"},
		{"relative XDG", 1000, map[string]string{"HOME": "/home/u", "XDG_CONFIG_HOME": "c"}, "/home/u/.config/sandboxd/sandboxd.yaml"},
		{"home", 1000, map[string]string{"HOME": "/home/u"}, "/home/u/.config/sandboxd/sandboxd.yaml"},
		{"homeless", 1000, nil, ""},
	} {
		want := []string{dirs.SystemConfig}
		if tc.own != "" {
			want = append(want, tc.own)
		}
		if got := dirs.FindConfig(dirs.Host{UID: tc.uid, Getenv: func(name string) string { return tc.env[name] }}); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", tc.name, got, want)
		}
	}
}
