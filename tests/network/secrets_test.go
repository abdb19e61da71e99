package network

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/tests/harness"
	"github.com/sandboxd/sandboxd/tests/network/op"
)

// bundleOfTheHost has the certificates that the gateway trusts: the world has its own there.
const bundleOfTheHost = "/etc/ssl/certs/ca-certificates.crt"

const inspected = `
version: 1
rules:
- {name: repos, allow: site.test, ports: 443, inspect: true, methods: [GET], paths: [/repos/*, /stored/*, /open]}
`

// The gateway reads requests within TLS, and puts a secret into the requests that its binding
// selects. The sandbox never has it: neither its environment nor its files, its memory, its record.
func TestSecretsStayOutside(t *testing.T) {
	w := internet(t)
	for _, who := range both {
		t.Run(who, func(t *testing.T) {
			secret, stored, newer := "s"+rand.Text(), "s"+rand.Text(), "s"+rand.Text()
			answer := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				auth := r.Header.Get("Authorization")
				_, _ = fmt.Fprintf(rw, "%s %s secret=%t stored=%t newer=%t none=%t", r.Proto, r.URL.Path, auth == "Bearer "+secret, auth == "Bearer "+stored, auth == "Bearer "+newer, auth == "")
			})
			site(t, w, map[string]http.Handler{"/repos/": answer, "/stored/": answer, "/open": answer, "/closed": answer})
			o := options(t, w, who)
			file := w.file("secrets-" + who + ".yaml")
			text := "version: 1\nsecrets:\n- name: token\n  variable: TOKEN\n  host: " + op.Site + "\n  paths: [/repos/*]\n  bearer: {env: SECRET_OF_TEST}\n"
			if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			o.Args, o.Env = append(o.Args, "--secrets", file), append(o.Env, "SECRET_OF_TEST="+secret)
			d := harness.Start(t, o)
			set := func(value string) {
				t.Helper()
				req := api.SetSecret{Kind: api.SecretBearer, Value: value, Host: op.Site, Paths: []string{"/stored/*"}, Variable: "STORED"}
				if got, err := d.Client(t).SetSecret(t.Context(), "stored", req); err != nil || strings.Contains(fmt.Sprintf("%+v", got), value) {
					t.Fatalf("%+v, %v", got, err)
				}
			}
			set(stored)
			s := d.Create(t, api.CreateSandbox{Network: api.Network{Mode: api.NetworkEgress, Policy: inspected, Secrets: []string{"token", "stored"}}})

			curl := func(more string) string { return s.Sh(t, "curl -sS "+more+" 2>&1; true") }
			for _, c := range []struct{ args, want string }{
				{`-H "Authorization: Bearer $TOKEN" https://site.test/repos/a`, "HTTP/2.0 /repos/a secret=true"},
				{`--http1.1 -H "Authorization: Bearer $TOKEN" https://site.test/repos/b`, "HTTP/1.1 /repos/b secret=true"},
				{`https://site.test/open`, "/open secret=false stored=false newer=false none=true"},
				{`-H "Authorization: Bearer $STORED" https://site.test/stored/a`, "stored=true"},
				{`-H "Authorization: Bearer $STORED" https://site.test/repos/a`, "not for this request"},
				{`-H "Authorization: Bearer $TOKEN" https://site.test/open`, "not for this request"},
				{`-H "X-Other: $TOKEN" https://site.test/repos/c`, "does not belong"},
				{`https://site.test/closed`, "no rule allows GET /closed"},
				{`-X POST https://site.test/open`, "no rule allows POST /open"},
			} {
				if got := curl(c.args); !strings.Contains(got, c.want) {
					t.Errorf("curl %s: %q, want %q", c.args, got, c.want)
				}
			}
			// Another value reaches the sandbox that runs, and so does the end of a secret.
			set(newer)
			if got := curl(`-H "Authorization: Bearer $STORED" https://site.test/stored/b`); !strings.Contains(got, "newer=true") {
				t.Errorf("after the change: %q", got)
			}
			// A program that has made such a request, and still runs.
			const program = `
import os, sys, time, urllib.request
q = urllib.request.Request("https://site.test/repos/d", headers={"Authorization": "Bearer " + os.environ["TOKEN"]})
print(urllib.request.urlopen(q).read().decode(), flush=True)
time.sleep(3600)
`
			x, err := s.TryExec(t.Context(), api.ExecRequest{Argv: []string{"sh", "-c", "python3 -c '" + program + "' > /tmp/out & while ! grep -q d /tmp/out; do :; done; cat /tmp/out; " +
				"env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline; cat " + bundleOfTheHost + "; grep -r . /tmp /run /var/tmp /root /etc 2>/dev/null; true"}})
			if err != nil || !strings.Contains(x.Stdout, "secret=true") {
				t.Fatalf("%+v, %v", x, err)
			}
			all := []string{secret, stored, newer}
			for _, value := range all {
				if strings.Contains(x.Stdout, value) || strings.Contains(x.Stderr, value) {
					t.Error("a secret is in an environment, a command line or a file of the sandbox")
				}
			}
			long := s.Sh(t, "setsid python3 -c '"+program+"' > /tmp/again 2>&1 < /dev/null & while ! grep -q secret=true /tmp/again; do :; done; pgrep -c python3; true")
			if strings.TrimSpace(long) == "0" {
				t.Log("the program has ended with its exec")
			}
			for _, pid := range s.Processes(t) {
				for _, value := range all {
					if found, err := inMemory(pid, value); err != nil || found {
						t.Errorf("the memory of process %d: a secret is there: %t, %v", pid, found, err)
					}
				}
			}
			inspect, err := s.Inspect(t.Context())
			list, listErr := d.Client(t).Secrets(t.Context())
			for _, value := range all {
				if err != nil || listErr != nil || strings.Contains(fmt.Sprintf("%+v %+v", inspect, list), value) {
					t.Errorf("the sandbox's record and the list of secrets: %+v, %v, %+v, %v", inspect, err, list, listErr)
				}
			}
			if len(list) != 2 || list[0].Name != "stored" || list[1].Name != "token" {
				t.Errorf("the list of secrets: %+v", list)
			}
			put, refused := 0, 0
			for _, f := range s.Flows(t) {
				switch {
				case slices.ContainsFunc(all, func(value string) bool { return strings.Contains(fmt.Sprintf("%+v", f), value) }):
					t.Errorf("a secret is in a flow: %+v", f)
				case f.Kind == api.FlowRequest && f.Secret == "token" && f.Allow:
					put++
				case f.Kind == api.FlowRequest && f.Secret == "token":
					refused++
				}
			}
			if put < 3 || refused != 2 {
				t.Errorf("%d requests with the secret and %d refused placeholders are recorded, want at least 3 and 2", put, refused)
			}
			for _, value := range all {
				if strings.Contains(d.Log(), value) {
					t.Error("a secret is in the daemon's log")
				}
				if err := inFiles(d.DataDir, value); err != nil {
					t.Error(err)
				}
			}
			if err := d.Client(t).RemoveSecret(t.Context(), "stored"); err != nil {
				t.Error(err)
			}
			if got := curl(`-H "Authorization: Bearer $STORED" https://site.test/stored/c`); !strings.Contains(got, "stored=false newer=false none=false") {
				t.Errorf("after the end of the secret: %q", got)
			}
		})
	}
}

// inMemory looks for a text in the memory of a process. It leaves out mappings that cannot be read,
// such as mappings of devices.
func inMemory(pid int, text string) (bool, error) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil // it has ended
	}
	if err != nil {
		return false, err
	}
	mem, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		return false, err
	}
	defer mem.Close()
	for line := range strings.Lines(string(maps)) {
		var from, to int64
		var rights string
		if _, err := fmt.Sscanf(line, "%x-%x %s", &from, &to, &rights); err != nil || rights[0] != 'r' || to-from > 1<<30 {
			continue
		}
		data := make([]byte, to-from)
		n, _ := mem.ReadAt(data, from)
		if bytes.Contains(data[:n], []byte(text)) {
			return true, nil
		}
	}
	return false, nil
}

// inFiles reports a file below a directory that has a text.
func inFiles(dir, text string) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		defer f.Close()
		data, err := io.ReadAll(f)
		if err == nil && bytes.Contains(data, []byte(text)) {
			return fmt.Errorf("%s has the secret", path)
		}
		return err
	})
}
