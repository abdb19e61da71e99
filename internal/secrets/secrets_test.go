package secrets

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const hidden = "t0p-s3cret-value"

func TestRead(t *testing.T) {
	dir := t.TempDir()
	value, file := filepath.Join(dir, "value"), filepath.Join(dir, "secrets.yaml")
	t.Setenv("SECRET_OF_TEST", hidden)
	if err := os.WriteFile(value, []byte(hidden+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	text := `version: 1
secrets:
- name: github
  variable: GITHUB_TOKEN
  host: api.github.com
  methods: [GET]
  paths: [/repos/*]
  bearer: {file: ` + value + `}
- name: git
  host: git.example.com
  port: 8443
  basic: {user: bot, password: {env: SECRET_OF_TEST}}
- name: model
  host: api.example.com
  always: true
  header: {name: X-Api-Key, value: {env: SECRET_OF_TEST}}
- name: store
  host: s3.example.com
  aws: {access_key_id: AKIAEXAMPLE, secret_key: {env: SECRET_OF_TEST}, session_token: {file: ` + value + `}}
`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	all, err := Read(file)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != 4 {
		t.Fatalf("%d secrets", len(all))
	}
	for name, s := range all {
		if s.Value != hidden || s.Name != name {
			t.Errorf("%s: another value, or name %q", name, s.Name)
		}
		if one, two := s.Placed().Binding.Placeholder, s.Placed().Binding.Placeholder; one == two || len(one) < 30 {
			t.Errorf("%s: placeholders %q and %q", name, one, two)
		}
		if _, err := s.Placed().Gateway(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q"} {
			if text := fmt.Sprintf(verb, s) + fmt.Sprintf(verb, &s) + fmt.Sprintf(verb, all); strings.Contains(text, hidden) {
				t.Errorf("%s of %s shows the value: %s", verb, name, text)
			}
		}
	}
	if g := all["github"]; g.Variable != "GITHUB_TOKEN" || g.Kind != Bearer || g.Binding.Paths[0] != "/repos/*" {
		t.Errorf("%+v", g.Binding)
	}
}

func TestMistakes(t *testing.T) {
	entry := func(more string) string {
		return "version: 1\nsecrets:\n- name: a\n  host: example.com\n" + more
	}
	bearer := "  bearer: {env: V}\n"
	for name, tt := range map[string]struct{ text, says string }{
		"no version":       {"secrets: []\n", "version"},
		"an unknown key":   {entry(bearer + "  hosts: b\n"), "hosts"},
		"no name":          {"version: 1\nsecrets:\n- host: example.com\n" + bearer, "name"},
		"two of one name":  {entry(bearer) + "- name: a\n  host: example.com\n" + bearer, "two of this name"},
		"no host":          {"version: 1\nsecrets:\n- name: a\n" + bearer, `"a"`},
		"a pattern":        {"version: 1\nsecrets:\n- name: a\n  host: \"*.example.com\"\n" + bearer, `"a"`},
		"no kind":          {entry(""), "one of bearer"},
		"two kinds":        {entry(bearer + "  basic: {password: {env: V}}\n"), "one of bearer"},
		"two sources":      {entry("  bearer: {env: V, file: f}\n"), "either file or env"},
		"no source":        {entry("  bearer: {}\n"), "either file or env"},
		"no such variable": {entry("  bearer: {env: MISSING}\n"), "no MISSING"},
		"no such file":     {entry("  bearer: {file: missing}\n"), "missing"},
		"a short value":    {entry("  bearer: {env: SHORT}\n"), "bytes"},
		"a bad variable":   {entry(bearer + "  variable: 1A\n"), "1A"},
		"a bad path":       {entry(bearer + "  paths: [x]\n"), `"a"`},
		"the value itself": {entry("  bearer: " + hidden + "\n"), "a value"},
		"two documents":    {entry(bearer) + "---\nversion: 1\n", "more than one"},
		"nothing":          {"", "EOF"},
	} {
		_, err := parse([]byte(tt.text), func(name string) (string, bool) {
			return map[string]string{"V": hidden, "SHORT": "x"}[name], name != "MISSING"
		}, func(name string) (string, error) { return "", fmt.Errorf("no file %s", name) })
		if err == nil || !strings.Contains(err.Error(), tt.says) || strings.Contains(err.Error(), hidden[:5]) {
			t.Errorf("%s: %v, want an error that mentions %q and no value", name, err, tt.says)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("version: 1\nsecrets:\n- name: a\n  host: example.com\n  bearer: {env: V}\n"))
	f.Add([]byte("version: 1\nsecrets:\n- name: a\n  host: example.com\n  aws: {access_key_id: A, secret_key: {file: V}}\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		all, err := parse(data, func(string) (string, bool) { return hidden, true }, func(string) (string, error) { return hidden, nil })
		if err != nil && strings.Contains(err.Error(), hidden) {
			t.Fatalf("an error with the value: %v", err)
		}
		for _, s := range all {
			if _, err := s.Placed().Gateway(); err != nil {
				t.Fatalf("accepted and unusable: %v", err)
			}
		}
	})
}
