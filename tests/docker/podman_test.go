package docker

import (
	"net/http"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// A podman that is pointed at the face asks for its own API first, and ends with an error at once.
// It shows the status alone; the answer has the reason for those that read it.
func TestPodmanRemoteIsRefused(t *testing.T) {
	testenv.SameForAll(t)
	podman := testenv.RequirePeer(t, "podman")
	f := serve(t)
	for _, line := range []string{"version", "ps", "run --rm tool:1 true"} {
		argv := append([]string{podman, "--remote", "--url", "unix://" + f.socket}, strings.Fields(line)...)
		if code, stdout, stderr := f.run(t, "", argv...); code != 125 || stdout != "" || !strings.Contains(stderr, "ping response was 404") {
			t.Errorf("podman %s: %d %q %q", line, code, stdout, stderr)
		}
	}
	for _, path := range []string{"/v4.3.1/libpod/_ping", "/libpod/info", "/v5.0.0/libpod/containers/json"} {
		if status, answer := f.do(t, "GET", path, "", nil); status != http.StatusNotFound || !strings.Contains(answer, "podman's own API is not served") {
			t.Errorf("%s: %d %s", path, status, answer)
		}
	}
}
