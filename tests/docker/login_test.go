package docker

import (
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// TestLogin logs in at a registry with a password, and pushes and pulls with what docker keeps.
func TestLogin(t *testing.T) {
	testenv.SameForAll(t)
	registry := harness.GuardedRegistry(t)
	f := start(t, "--registry-ca", registry.CA)
	f.images(t)
	docker := filepath.Join(f.bin, "docker")
	login := func(password, address string) (int, string) {
		code, stdout, stderr := f.run(t, password, docker, "login", "-u", harness.RegistryUser, "--password-stdin", address)
		return code, stdout + stderr
	}
	target := registry.Host + "/mine:1"
	f.must(t, docker, "tag", image, target)
	if code, _, stderr := f.run(t, "", docker, "push", target); code == 0 {
		t.Errorf("pushed without a password: %s", stderr)
	}
	for password, want := range map[string]string{"wrong": "401 Unauthorized", harness.RegistryPassword: "Login Succeeded"} {
		code, said := login(password, registry.Host)
		if (code == 0) != (password == harness.RegistryPassword) || !strings.Contains(said, want) {
			t.Errorf("%q: %d %s", password, code, said)
		}
	}
	if code, said := login(harness.RegistryPassword, "127.0.0.1:1"); code != 1 || !strings.Contains(said, "127.0.0.1:1") {
		t.Errorf("%d %s", code, said)
	}
	f.must(t, docker, "push", target)
	f.must(t, docker, "rmi", target)
	f.must(t, docker, "pull", target)
	f.must(t, docker, "logout", registry.Host)
	if code, _, _ := f.run(t, "", docker, "push", target); code == 0 {
		t.Error("pushed after the logout")
	}
	for body, status := range map[string]int{
		`{`: http.StatusBadRequest, `{"serveraddress":"a b"}`: http.StatusBadRequest, `{"serveraddress":"a/../../b:1"}`: http.StatusBadRequest,
	} {
		got, answer := f.do(t, "POST", "/auth", "application/json", []byte(body))
		if got != status {
			t.Errorf("%s: %d %s", body, got, answer)
		}
		message(t, answer)
	}
}
