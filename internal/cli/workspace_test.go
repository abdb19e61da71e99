package cli

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestParseWorkspace(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"plain", "with:colon"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("plain", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
	for text, want := range map[string][2]string{
		"plain":             {"plain", ""},
		"./plain/":          {"plain", ""},
		"plain:/work":       {"plain", "/work"},
		"with:colon":        {"with:colon", ""},
		"with:colon:/a":     {"with:colon", "/a"},
		"link":              {"plain", ""},
		dir + "/plain:/a/b": {"plain", "/a/b"},
	} {
		w, err := parseWorkspace(t.Context(), text, false)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if w.Source != filepath.Join(dir, want[0]) || w.Target != want[1] || w.Inode == 0 {
			t.Errorf("%s: %+v", text, w)
		}
	}
	for _, text := range []string{"missing", "file", "plain:relative", ":/work"} {
		if w, err := parseWorkspace(t.Context(), text, false); err == nil {
			t.Errorf("%s: %+v", text, w)
		}
	}
	if w, err := parseWorkspace(t.Context(), "", false); w != nil || err != nil {
		t.Errorf("no workspace: %+v, %v", w, err)
	}
	if _, err := parseWorkspace(t.Context(), "", true); err == nil {
		t.Error("--gitignore without a workspace")
	}
	if err := os.WriteFile(filepath.Join(dir, "plain", ".sandboxdignore"), []byte("*.key\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a.key", ".gitignore", "b"} {
		if err := os.WriteFile(filepath.Join(dir, "plain", name), []byte("b\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for git, want := range map[bool][]string{false: {"a.key"}, true: {"a.key", "b"}} {
		if w, err := parseWorkspace(t.Context(), "plain", git); err != nil || !slices.Equal(w.Hidden, want) {
			t.Errorf("with gitignore %v: %+v, %v", git, w, err)
		}
	}
}
