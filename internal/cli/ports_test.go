package cli

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// A Unix socket has mode 0600, replaces no file, and is removed with its listener.
func TestOpenListensOnUnixSockets(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := listenOn(t.Context(), "unix:"+path)
	if err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Lstat(path); err != nil || fi.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("%v, %v", fi, err)
	}
	if again, err := listenOn(t.Context(), "unix:"+path); err == nil {
		_ = again.Close()
		t.Error("a second one took its place")
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it is left: %v", err)
	}
	for _, where := range []string{"unix:", "unix:@abstract", "nowhere"} {
		if l, err := listenOn(t.Context(), where); err == nil {
			_ = l.Close()
			t.Errorf("%s is listened on", where)
		}
	}
	tcp, err := listenOn(t.Context(), "127.0.0.1:0")
	if err != nil || tcp.Addr().Network() != "tcp" {
		t.Fatal(err)
	}
	_ = tcp.Close()
}
