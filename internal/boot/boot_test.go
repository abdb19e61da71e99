package boot

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPrivateDirRefusesWhatOthersCanEnter(t *testing.T) {
	parent := t.TempDir()
	fresh := filepath.Join(parent, "a", "fresh")
	if err := privateDir(fresh); err != nil {
		t.Error(err)
	}
	if fi, err := os.Stat(fresh); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("made with mode %v, %v", fi.Mode(), err)
	}
	open := filepath.Join(parent, "open")
	for _, mode := range []os.FileMode{0o755, 0o711, 0o770, 0o777} {
		_ = os.Remove(open)
		if err := os.Mkdir(open, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(open, mode); err != nil {
			t.Fatal(err)
		}
		if err := privateDir(open); err == nil || !strings.Contains(err.Error(), "chmod 700") {
			t.Errorf("mode %v: %v, want a refusal with the remedy", mode, err)
		}
		if fi, err := os.Stat(open); err != nil || fi.Mode().Perm() != mode {
			t.Errorf("mode %v was changed to %v, %v", mode, fi.Mode(), err)
		}
	}
	other := "/proc" // root's; for root, one of another user
	if os.Geteuid() == 0 {
		other = filepath.Join(parent, "other")
		if err := os.Mkdir(other, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(other, 12345, 12345); err != nil {
			t.Fatal(err)
		}
	}
	if err := privateDir(other); err == nil || !strings.Contains(err.Error(), "does not belong") {
		t.Errorf("a directory of another user: %v", err)
	}
	link := filepath.Join(parent, "link")
	if err := os.Symlink(fresh, link); err != nil {
		t.Fatal(err)
	}
	if err := privateDir(link); err == nil {
		t.Error("a link was taken for a directory")
	}
}

// Wrong options of registries are found before anything is started.
func TestRegistryFlags(t *testing.T) {
	good, err := (&Options{Mirrors: []string{"docker.io=m.example:5000", "docker.io=localhost:1"}, InsecureRegistries: []string{"127.0.0.1:5000"}}).registries()
	if err != nil || cmp.Diff(map[string][]string{"docker.io": {"m.example:5000", "localhost:1"}}, good.Mirrors) != "" {
		t.Errorf("%+v, %v", good, err)
	}
	for _, tt := range []struct {
		opts Options
		says string
	}{
		{Options{Mirrors: []string{"docker.io"}}, "REGISTRY=MIRROR"},
		{Options{Mirrors: []string{"docker.io=https://m.example"}}, "https://m.example"},
		{Options{Mirrors: []string{"docker.io=m.example/path"}}, "m.example/path"},
		{Options{InsecureRegistries: []string{"http://x"}}, "http://x"},
		{Options{RegistryCAs: []string{"/no/such/ca.pem"}}, "/no/such/ca.pem"},
		{Options{RegistryCAs: []string{"/dev/null"}}, "no certificate"},
	} {
		if _, err := tt.opts.registries(); err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%+v: error %v, want one that mentions %q", tt.opts, err, tt.says)
		}
	}
}
