package records

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

type record struct{ Value string }

func read(dir string) (map[string]string, error) {
	got := map[string]string{}
	err := Read(dir, func(name string, rec record) error {
		if rec.Value == "" {
			return errors.New("it has no value")
		}
		got[name] = rec.Value
		return nil
	})
	return got, err
}

func TestRecords(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made")
	if got, err := read(dir); err != nil || len(got) > 0 {
		t.Fatalf("%v, %v", got, err)
	}
	for _, rec := range []record{{"old"}, {"new"}} {
		if err := Write(dir, "one", rec); err != nil {
			t.Fatal(err)
		}
	}
	half := filepath.Join(dir, "new-123")
	if err := os.WriteFile(half, []byte(`{"Val`), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := read(dir)
	if err != nil || !maps.Equal(got, map[string]string{"one": "new"}) {
		t.Errorf("%v, %v", got, err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 || left[0].Name() != "one.json" {
		t.Errorf("left are %v, %v", left, err)
	}
	for content, says := range map[string]string{`{"Val`: "unexpected end", "{}": "it has no value"} {
		if err := os.WriteFile(Path(dir, "one"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := read(dir); err == nil || !strings.Contains(err.Error(), Path(dir, "one")) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", content, err)
		}
	}
}

// A record that cannot be put in its place leaves that of before, and nothing beside it.
func TestFailedWriteLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(Path(dir, "one"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Write(dir, "one", record{"new"}); err == nil {
		t.Error("a directory was replaced")
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("left are %v, %v", left, err)
	}
}
