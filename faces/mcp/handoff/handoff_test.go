package handoff

import (
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
)

// A request arrives whole, from a descriptor that is closed then.
func TestRequestArrives(t *testing.T) {
	want := Request{
		Version: "v", Socket: "/s", Images: []string{"a"}, Timeout: 1500 * time.Millisecond, Listen: []string{"unix:/m"}, Tied: true,
		Sandbox: api.CreateSandbox{Image: "i", Env: []string{"SECRET=1"}, Timeout: api.Never, Labels: map[string]string{"k": "v"}},
	}
	f, err := want.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fd, err := unix.Dup(int(f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	got, err := Read(strconv.Itoa(fd))
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Error(err, diff)
	}
	for _, number := range []string{strconv.Itoa(fd), "", "x", "0", "2", "-1"} {
		if _, err := Read(number); err == nil {
			t.Errorf("descriptor %q has a request", number)
		}
	}
}
