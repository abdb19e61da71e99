package network

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/secrets"
	"github.com/sandboxd/sandboxd/internal/service/class"
	"github.com/sandboxd/sandboxd/netns/gateway"
)

const (
	value     = "t0p-s3cret-value"
	inspected = "version: 1\nrules:\n- {allow: example.com, ports: 443, inspect: true}\n"
	opaque    = "version: 1\nrules:\n- {allow: example.com, ports: 443}\n"
)

func bearer() api.SetSecret {
	return api.SetSecret{Kind: api.SecretBearer, Value: value, Host: "example.com"}
}

// withSecrets returns networks with three secrets: "file" from the operator's file, "mine" of the
// operator and "theirs" of a tenant.
func withSecrets(t *testing.T) *Networks {
	t.Helper()
	n := open(t, nil)
	n.opts.Secrets = map[string]secrets.Secret{"file": {Name: "file", Kind: secrets.Bearer, Value: value, Binding: gateway.Binding{Name: "file", Host: "example.com"}}}
	for tenant, name := range map[string]string{"": "mine", "uid:1002": "theirs"} {
		if _, err := n.SetSecret(t.Context(), tenant, name, bearer()); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// A sandbox has secrets of its own tenant only, and only under a policy that reads requests.
func TestCheckSecrets(t *testing.T) {
	n := withSecrets(t)
	for name, tt := range map[string]struct {
		tenant, policy string
		secrets        []string
		err            string // part of it; "": none
	}{
		"the operator's":                  {"", inspected, []string{"file", "mine"}, ""},
		"a tenant's":                      {"uid:1002", inspected, []string{"theirs"}, ""},
		"a tenant's, of the operator":     {"", inspected, []string{"theirs"}, "there is none"},
		"the operator's, of a tenant":     {"uid:1002", inspected, []string{"mine"}, "there is none"},
		"the file's, of a tenant":         {"uid:1002", inspected, []string{"file"}, "there is none"},
		"another tenant's":                {"uid:1003", inspected, []string{"theirs"}, "there is none"},
		"none of the name":                {"", inspected, []string{"nothing"}, "there is none"},
		"a path as a name":                {"", inspected, []string{"../key"}, "there is none"},
		"twice":                           {"", inspected, []string{"mine", "mine"}, "twice"},
		"a policy that reads no requests": {"uid:1002", opaque, []string{"theirs"}, "inspect: true"},
	} {
		net := api.Network{Mode: api.NetworkEgress, Policy: tt.policy, Secrets: tt.secrets}
		_, err := n.Check(tt.tenant, net)
		if tt.err == "" && err != nil || tt.err != "" && (!errors.Is(err, class.ErrInvalid) || !strings.Contains(err.Error(), tt.err)) {
			t.Errorf("%s: %v, want %q", name, err, tt.err)
		}
		if tt.err == "" {
			if i, err := n.Inspect(tt.tenant, net); err != nil || len(i.placeholders) != len(tt.secrets) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	// Secrets that do not fit beside each other are refused before a sandbox is made.
	large := bearer()
	large.Value = strings.Repeat("x", 16<<10)
	for _, name := range []string{"one", "two"} {
		if _, err := n.SetSecret(t.Context(), "", name, large); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := n.Check("", api.Network{Mode: api.NetworkEgress, Policy: inspected, Secrets: []string{"one", "two"}}); !errors.Is(err, class.ErrInvalid) {
		t.Errorf("two large ones: %v", err)
	}
}

// Lists contain no values. Secrets of the file are listed for the operator only, and cannot be
// changed.
func TestSecretsAreListedWithoutValues(t *testing.T) {
	n := withSecrets(t)
	aws := api.SetSecret{
		Kind: api.SecretAWS, Value: value, AccessKeyID: "AKIA" + "PLANTED", SessionToken: value + "-token", Host: "s3.example.com",
		Port: 9000, Methods: []string{"PUT"}, Paths: []string{"/b/*"}, Variable: "AWS_ACCESS_KEY_ID",
	}
	if _, err := n.SetSecret(t.Context(), "", "store", aws); err != nil {
		t.Fatal(err)
	}
	user := api.SetSecret{Kind: api.SecretBasic, Value: value, User: "user-PLANTED", Host: "example.com"}
	if _, err := n.SetSecret(t.Context(), "", "git", user); err != nil {
		t.Fatal(err)
	}
	got, err := n.Secrets("")
	want := []api.Secret{
		{Name: "file", Kind: api.SecretBearer, Host: "example.com", Port: 443, File: true},
		{Name: "git", Kind: api.SecretBasic, Host: "example.com", Port: 443},
		{Name: "mine", Kind: api.SecretBearer, Host: "example.com", Port: 443},
		{Name: "store", Kind: api.SecretAWS, Host: "s3.example.com", Port: 9000, Methods: []string{"PUT"}, Paths: []string{"/b/*"}, Variable: "AWS_ACCESS_KEY_ID"},
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(api.Secret{}, "CreatedAt", "ChangedAt")); diff != "" || err != nil {
		t.Error(diff, err)
	}
	for _, s := range got {
		if s.File != s.CreatedAt.IsZero() || s.File != s.ChangedAt.IsZero() {
			t.Errorf("times of %+v", s)
		}
	}
	if text := fmt.Sprintf("%+v", got); strings.Contains(text, value) || strings.Contains(text, "PLANTED") {
		t.Errorf("the list tells too much: %s", text)
	}
	if theirs, err := n.Secrets("uid:1002"); err != nil || len(theirs) != 1 || theirs[0].Name != "theirs" {
		t.Errorf("a tenant's: %+v, %v", theirs, err)
	}
	if none, err := n.Secrets("uid:1003"); err != nil || none == nil || len(none) != 0 {
		t.Errorf("of none: %+v, %v", none, err)
	}
	if _, err := n.SetSecret(t.Context(), "", "file", bearer()); !errors.Is(err, class.ErrSecretOfFile) {
		t.Errorf("another value of the file's: %v", err)
	}
	if err := n.RemoveSecret(t.Context(), "", "file"); !errors.Is(err, class.ErrSecretOfFile) {
		t.Errorf("the file's is removed: %v", err)
	}
	if _, err := n.SetSecret(t.Context(), "uid:1002", "file", bearer()); err != nil {
		t.Errorf("a tenant's that has the name of the file's: %v", err)
	}
	if err := n.RemoveSecret(t.Context(), "uid:1002", "mine"); !errors.Is(err, class.ErrNoSecret) {
		t.Errorf("a tenant removes the operator's: %v", err)
	}
	if err := n.RemoveSecret(t.Context(), "", "mine"); err != nil {
		t.Error(err)
	}
}

// A secret that does not fit beside the others of a running sandbox is not stored, and one that was
// removed is removed again from a sandbox that may still have it.
func TestSecretsOfARunningSandbox(t *testing.T) {
	n := withSecrets(t)
	n.lives["box"] = &life{tenant: "uid:1", secrets: []string{"one", "two"}}
	set := func(name string, size int) error {
		s := bearer()
		s.Value = strings.Repeat("v", size)
		_, err := n.SetSecret(t.Context(), "uid:1", name, s)
		return err
	}
	if err := errors.Join(set("one", 10<<10), set("two", 10<<10)); err != nil {
		t.Fatal(err)
	}
	if err := set("two", 16<<10); !errors.Is(err, class.ErrInvalid) {
		t.Errorf("more than a sandbox may have: %v", err)
	}
	if s, err := n.opts.Store.Get("uid:1", "two"); err != nil || len(s.Value) != 10<<10 {
		t.Errorf("stored: %d bytes, %v", len(s.Value), err)
	}
	if err := n.RemoveSecret(t.Context(), "uid:1", "two"); err != nil {
		t.Fatal(err)
	}
	n.lives["box"].behind.Store(true) // as after a gateway that did not answer
	if err := n.RemoveSecret(t.Context(), "uid:1", "two"); err != nil {
		t.Errorf("removed again: %v", err)
	}
	if err := n.RemoveSecret(t.Context(), "uid:1", "two"); !errors.Is(err, secrets.ErrNotFound) {
		t.Errorf("no sandbox is behind: %v", err)
	}
}

// A secret that cannot be read is listed as such, beside the others, and can be removed.
func TestUnreadableSecrets(t *testing.T) {
	dir := t.TempDir()
	n := open(t, nil)
	n.opts.Store = secrets.NewStore(dir)
	for _, name := range []string{"bad", "good"} {
		if _, err := n.SetSecret(t.Context(), "", name, bearer()); err != nil {
			t.Fatal(err)
		}
	}
	files, err := filepath.Glob(filepath.Join(dir, "*", "bad"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	if err := os.WriteFile(files[0], []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	all, err := n.Secrets("")
	if err != nil || len(all) != 2 || all[0].Name != "bad" || !strings.Contains(all[0].Error, "another format") || all[1].Name != "good" || all[1].Error != "" || all[1].Host == "" {
		t.Errorf("%+v, %v", all, err)
	}
	// The operator's file has one of the name: the error tells of the stored one.
	n.opts.Secrets = map[string]secrets.Secret{"bad": {Name: "bad"}, "new": {Name: "new"}}
	if err := n.RemoveSecret(t.Context(), "", "bad"); !errors.Is(err, class.ErrSecretOfFile) || !strings.Contains(err.Error(), "kept unused") {
		t.Errorf("one that the file's shadows: %v", err)
	}
	if err := n.RemoveSecret(t.Context(), "", "new"); !errors.Is(err, class.ErrSecretOfFile) || strings.Contains(err.Error(), "kept unused") {
		t.Errorf("one of the file only: %v", err)
	}
	n.opts.Secrets = nil
	if err := n.RemoveSecret(t.Context(), "", "bad"); err != nil {
		t.Error(err)
	}
	if all, err := n.Secrets(""); err != nil || len(all) != 1 {
		t.Errorf("left: %+v, %v", all, err)
	}
}

func TestMistakesInSecrets(t *testing.T) {
	n := open(t, nil)
	for name, change := range map[string]func(*api.SetSecret){
		"no kind":             func(s *api.SetSecret) { s.Kind = "" },
		"an unknown kind":     func(s *api.SetSecret) { s.Kind = "cookie" },
		"no value":            func(s *api.SetSecret) { s.Value = "" },
		"two lines":           func(s *api.SetSecret) { s.Value += "\nX-Other: " + value },
		"no host":             func(s *api.SetSecret) { s.Host = "" },
		"a pattern":           func(s *api.SetSecret) { s.Host = "*.example.com" },
		"a user of bearer":    func(s *api.SetSecret) { s.User = "me" },
		"a header of bearer":  func(s *api.SetSecret) { s.Header = "x-key" },
		"a key id of bearer":  func(s *api.SetSecret) { s.AccessKeyID = "A" },
		"a token of bearer":   func(s *api.SetSecret) { s.SessionToken = value },
		"a header of the hop": func(s *api.SetSecret) { s.Kind, s.Header = api.SecretHeader, "Host" },
		"no header":           func(s *api.SetSecret) { s.Kind = api.SecretHeader },
		"a method":            func(s *api.SetSecret) { s.Methods = []string{"G ET"} },
		"a path":              func(s *api.SetSecret) { s.Paths = []string{"x"} },
		"a variable":          func(s *api.SetSecret) { s.Variable = "A B" },
		"a signature for all": func(s *api.SetSecret) { s.Kind, s.AccessKeyID, s.Always = api.SecretAWS, "AKIA", true },
		"two kinds' fields":   func(s *api.SetSecret) { s.Kind, s.User, s.Header = api.SecretBasic, "me", "x-key" },
	} {
		s := bearer()
		change(&s)
		if _, err := n.SetSecret(t.Context(), "", "a", s); !errors.Is(err, class.ErrInvalid) || strings.Contains(err.Error(), value) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := n.SetSecret(t.Context(), "", "a/b", bearer()); !errors.Is(err, class.ErrInvalid) {
		t.Errorf("a bad name: %v", err)
	}
}
