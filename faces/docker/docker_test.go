package docker

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moby/moby/api/types/container"

	"github.com/sandboxd/sandboxd/api"
)

// fieldNames returns the names that the fields of a type have in JSON, embedded ones included.
func fieldNames(typ reflect.Type) []string {
	var names []string
	for field := range typ.Fields() {
		if field.Anonymous {
			names = append(names, fieldNames(field.Type)...)
			continue
		}
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		if name == "" {
			name = field.Name
		}
		names = append(names, name)
	}
	return names
}

// Every field of HostConfig has a rule, and the document shows it.
func TestHostFields(t *testing.T) {
	var rows, doc []string
	for _, row := range HostFields {
		rows = append(rows, row.Name)
		doc = append(doc, fmt.Sprintf("| %s | %s | %s |", row.Name, row.Rule, row.Note))
	}
	names := fieldNames(reflect.TypeFor[container.HostConfig]())
	slices.Sort(names)
	if !slices.Equal(rows, names) {
		t.Errorf("the table has the fields\n%v\nand Docker has\n%v", rows, names)
	}
	text, err := os.ReadFile("../../docs/reference/docker.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), strings.Join(doc, "\n")) {
		t.Errorf("docs/reference/docker.md does not have the table:\n%s", strings.Join(doc, "\n"))
	}
}

func TestIDs(t *testing.T) {
	for _, id := range []string{"abcdefghjkmn", "zzzzzzzzzzz9", "aaaaaaaaaaaa", "023456789pqr"} {
		long := containerID(id)
		if back, ok := sandboxID(long); !ok || back != id || len(long) != 64 || !isHex(long) {
			t.Errorf("%s: %s, %s, %v", id, long, back, ok)
		}
		x := execID(id, "abcdefg23456")
		if of, exec, ok := execOf(x); !ok || of != id || exec != "abcdefg23456" || len(x) != 64 {
			t.Errorf("%s: exec %s, %s, %s, %v", id, x, of, exec, ok)
		}
		if _, ok := sandboxID(strings.Repeat("0", 64)); ok {
			t.Error("an ID of zeros stands for a sandbox")
		}
	}
}

func TestNames(t *testing.T) {
	for in, want := range map[string]string{
		"alpine": "docker.io/library/alpine:latest", "a/b:1": "docker.io/a/b:1", "localhost:5000/x": "localhost:5000/x:latest",
		"ghcr.io/a/b@sha256:00": "ghcr.io/a/b@sha256:00", "docker.io/alpine:3": "docker.io/library/alpine:3", "localhost/x:1": "localhost/x:1",
	} {
		if got := normalize(in); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
	for _, bad := range []string{"", "../x", "a b", "x;y", "a\nb", "/abs", "a//b", "ä"} {
		if checkReference(bad) == nil {
			t.Errorf("%q is a reference", bad)
		}
	}
}

// The keys end the stream, wherever reads break, and a part of them that something else follows is
// input.
func TestDetachKeys(t *testing.T) {
	keys, err := keysOf("ctrl-p,ctrl-q")
	if err != nil || !bytes.Equal(keys, []byte{16, 17}) {
		t.Fatal(keys, err)
	}
	for _, tc := range []struct {
		in, out string
		err     error
	}{
		{"abc", "abc", nil}, {"a\x10\x11b", "a", errDetached}, {"\x10x\x10\x11", "\x10x", errDetached}, {"\x10\x10\x11", "\x10", errDetached}, {"end\x10", "end\x10", nil},
	} {
		for _, r := range []io.Reader{strings.NewReader(tc.in), oneByte{strings.NewReader(tc.in)}} {
			out, err := io.ReadAll(&escaping{r: r, keys: keys})
			if string(out) != tc.out || !errors.Is(err, tc.err) {
				t.Errorf("%q: %q, %v; want %q, %v", tc.in, out, err, tc.out, tc.err)
			}
		}
	}
	if _, err := keysOf("ctrl-é"); err == nil {
		t.Error("ctrl-é is a key")
	}
}

type oneByte struct{ io.Reader }

func (r oneByte) Read(p []byte) (int, error) { return r.Reader.Read(p[:min(1, len(p))]) }

func TestTruth(t *testing.T) {
	for in, want := range map[string]bool{"": false, "0": false, "no": false, "False": false, "none": false, "1": true, "True": true, "yes": true} {
		if truth(in) != want {
			t.Errorf("%q: %v", in, !want)
		}
	}
}

// A bind's source is a directory of the host, a volume's name, or left out.
func TestBinds(t *testing.T) {
	for bind, want := range map[string]api.Mount{
		"/a/./b:/x":        {Type: api.MountBind, Source: "/a/b", Target: "/x", Create: true},
		"/a:/x/:ro,nocopy": {Type: api.MountBind, Source: "/a", Target: "/x", ReadOnly: true, Create: true},
		"v1:/x":            {Type: api.MountVolume, Source: "v1", Target: "/x"},
		"v.1_-:/x:nocopy":  {Type: api.MountVolume, Source: "v.1_-", Target: "/x", NoCopy: true},
		"v:/x:z,ro":        {Type: api.MountVolume, Source: "v", Target: "/x", ReadOnly: true},
		"/x/":              {Type: api.MountVolume, Target: "/x"},
	} {
		if got, err := bindOf(bind); err != nil || got != want {
			t.Errorf("%q: %+v, %v; want %+v", bind, got, err, want)
		}
	}
	for _, bind := range []string{"", "x", ":/x", "a/b:/x", ".:/x", "..:/x", "-v:/x", "a b:/x", "v\n:/x", "ä:/x", "v:/x:rshared", "v:/x:ro:more", strings.Repeat("v", 129) + ":/x"} {
		if got, err := bindOf(bind); err == nil || statusOf(err) != http.StatusBadRequest {
			t.Errorf("%q: %+v, %v", bind, got, err)
		}
	}
}

// A health check of Docker becomes one of ours and back. Times beside NONE, which the daemon
// refuses, are dropped.
func TestHealthChecks(t *testing.T) {
	h := &container.HealthConfig{
		Test: []string{"CMD", "true"}, Interval: 1500 * time.Millisecond, Timeout: time.Minute, StartPeriod: time.Millisecond, StartInterval: 2 * time.Second, Retries: 7,
	}
	ours := healthOf(h)
	if ours.Interval != 1.5 || ours.Timeout != 60 || ours.StartPeriod != 0.001 || ours.StartInterval != 2 || ours.Retries != 7 {
		t.Errorf("%+v", ours)
	}
	if back := healthConfig(ours); !reflect.DeepEqual(back, h) {
		t.Errorf("%+v, want %+v", back, h)
	}
	if got := healthOf(&container.HealthConfig{Test: []string{"NONE"}, Interval: time.Second}); !reflect.DeepEqual(got, &api.HealthCheck{Test: []string{"NONE"}}) {
		t.Errorf("NONE: %+v", got)
	}
	if got := healthOf(nil); got != nil {
		t.Errorf("no request: %+v", got)
	}
}
