package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/agent/llm/llmtest"
	"github.com/sandboxd/sandboxd/api"
)

// Files that a run makes or changes outside of its output directory are listed, so that none is
// lost in silence, and those that the options name are collected.
func TestFilesElsewhere(t *testing.T) {
	in := t.TempDir()
	old := time.Unix(1e9, 0)
	for _, name := range []string{"same", "changed"} {
		path := filepath.Join(in, name)
		if err := errors.Join(os.WriteFile(path, []byte("1"), 0o600), os.Chtimes(path, old, old)); err != nil {
			t.Fatal(err)
		}
	}
	opts, sandbox, _ := newRun(t,
		turn(llmtest.Bash("echo out > out/f; echo 12 > in/changed; mkdir -p src/.cache lib; echo a > src/a.py; echo b > lib/b; touch -d @1000000000 lib/old; ln -s /etc/passwd lib/l; echo c > src/.cache/c")),
		turn(llmtest.Submit()))
	opts.InputDir = in
	opts.Collect.Paths = []string{"lib", "src/a.py", "missing", "out/f", "lib/b"}
	opts.Collect.Deny = []string{"b"}
	var shown strings.Builder
	opts.OnOutputs = func(o Outputs) { _ = PrintOutputs(&shown, o) }
	res, tr := mustRun(t, t.Context(), opts, sandbox, ExitSubmitted)
	w := filepath.Join(sandbox.dir, "w d")
	want := []Output{
		{Path: w + "/in/changed", Type: api.TypeFile, Size: 3, Stays: outsideOutput},
		{Path: w + "/lib/b", Type: api.TypeFile, Size: 2, Stays: "a pattern says that it stays"},
		{Path: w + "/lib/l", Type: api.TypeSymlink, Size: 11},
		{Path: w + "/lib/old", Type: api.TypeFile},
		{Path: w + "/src/a.py", Type: api.TypeFile, Size: 2},
	}
	if diff := cmp.Diff(want, tr.Metadata.Outputs.Elsewhere); diff != "" || tr.Metadata.Outputs.ElsewhereEntries != 5 {
		t.Errorf("changed elsewhere (-want +got):\n%s", diff)
	}
	if text := shown.String(); !strings.Contains(text, "changed elsewhere: 5 files\n") || !strings.Contains(text, "--collect PATH") || strings.Count(text, "(collected)") != 3 || !strings.Contains(text, "(stays: a pattern") {
		t.Errorf("shown:\n%s", text)
	}
	got := tree(t, filepath.Join(res.Dir, "collected", w))
	if diff := cmp.Diff(map[string]string{"lib": "/", "lib/old": "", "src": "/", "src/a.py": "a\n"}, got); diff != "" {
		t.Errorf("collected (-want +got):\n%s", diff)
	}
	if paths := slices.Sorted(maps.Keys(res.Output.Elsewhere)); !cmp.Equal(paths, []string{w + "/lib", w + "/missing", w + "/src/a.py"}) || len(res.Output.Elsewhere[w+"/lib"].Skipped) != 2 || len(res.Output.Elsewhere[w+"/missing"].Skipped) != 1 {
		t.Errorf("collected paths %v: %+v", paths, res.Output)
	}
}

// Bytes that are collected beside the output count against the same limits.
func TestLimitsElsewhere(t *testing.T) {
	for name, limits := range map[string]CollectLimits{"bytes": {Bytes: 5}, "entries": {Entries: 1}} {
		t.Run(name, func(t *testing.T) {
			opts, sandbox, _ := newRun(t, turn(llmtest.Bash("printf 12345 > out/f; echo x > g")), turn(llmtest.Submit()))
			opts.Collect = limits
			opts.Collect.Paths = []string{"g"}
			res, err := Run(t.Context(), opts)
			if err == nil || !strings.Contains(err.Error(), "limit of the output") || sandbox.deleted != 1 {
				t.Fatalf("%v", err)
			}
			if !strings.Contains(err.Error(), "/g: the limit") {
				t.Error(err)
			}
			if _, err := os.Stat(filepath.Join(res.Dir, "files/f")); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestCheckPaths(t *testing.T) {
	prompt := PromptConfig{WorkingDir: "/w", OutputDir: "/w/out"}
	got, err := checkPaths([]string{"/b/", "a", "/b/c", "/b-c", "/bc", "out/x", "/w/out", "a/../a"}, prompt)
	if diff := cmp.Diff([]string{"/b", "/b-c", "/bc", "/w/a"}, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	for _, bad := range []string{"", "/", "a\x00", "../..", strings.Repeat("a/", 200)} {
		if _, err := checkPaths([]string{bad}, prompt); err == nil {
			t.Errorf("%.20q was taken", bad)
		}
	}
}

// Where the marks are not those of the whole sandbox, as after a crash, a file's time decides.
func TestChangesWithoutMarks(t *testing.T) {
	since := time.Unix(1000, 0)
	m := &fileMarks{seed: maphash.MakeSeed(), since: since}
	changed := func(at time.Time) bool { return m.isChanged(api.FileEntry{Path: "/f", MTime: at}) }
	if changed(since.Add(-time.Second)) || !changed(since) {
		t.Error("judged otherwise than by the time")
	}
}

// A sandbox with any number of directories at its root costs a bounded number of requests.
func TestManyDirectoriesElsewhere(t *testing.T) {
	asked := 0
	c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked++
		w.Header().Set("Content-Type", api.TypeNDJSON)
		enc := json.NewEncoder(w)
		for i := 0; r.URL.Query().Get("path") == "/" && i < 10*maxTopDirs; i++ {
			_ = enc.Encode(api.ListEvent{Entry: &api.FileEntry{Path: fmt.Sprint("/d", i), Type: api.TypeDirectory}})
		}
		_ = enc.Encode(api.ListEvent{Done: true})
	}))
	r := &run{sandbox: NewSandbox(c, "fake"), l: newLedger()}
	r.l.run.Prompt.WorkingDir = "/testbed"
	more, err := r.lookElsewhere(t.Context(), func(api.FileEntry) {})
	if err != nil || !more || asked != maxTopDirs+2 {
		t.Errorf("%d requests, more %v, %v", asked, more, err)
	}
}
