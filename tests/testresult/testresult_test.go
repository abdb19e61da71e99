package testresult

import (
	"bytes"
	"encoding/xml"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// printed is the output of a test binary with the flags of [Flags]; \x16 marks the testing
// package's own lines.
const printed = "\x16=== RUN   TestGood\n\x16--- PASS: TestGood (0.25s)\n" +
	"\x16=== RUN   TestSkipped\n    x_test.go:5: needs cgroup: no memory controller\n\x16--- SKIP: TestSkipped (0.00s)\n" +
	"\x16=== RUN   TestParent\n\x16=== RUN   TestParent/bad\n    x_test.go:9: got 1 < 2 & \x01\n" +
	"\x16--- FAIL: TestParent (1.00s)\n\x16    --- FAIL: TestParent/bad (1.00s)\n"

func TestRead(t *testing.T) {
	testenv.RequirePeer(t, "go")
	p := Read(t.Context(), "example/x", []byte(printed+"\x16FAIL\n"), errors.New("exit status 1"))
	if p.Err != nil || p.OK() {
		t.Errorf("error %v, ok %v", p.Err, p.OK())
	}
	got := map[string]Outcome{}
	for _, test := range p.Tests {
		got[test.Name] = test.Outcome
	}
	want := map[string]Outcome{"TestGood": Pass, "TestSkipped": Skip, "TestParent": Fail, "TestParent/bad": Fail}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if got := p.Tests[0].Elapsed; got != 250*time.Millisecond {
		t.Errorf("elapsed %s", got)
	}
	if got := p.Tests[1].Reason(); !strings.Contains(got, "needs cgroup: no memory controller") {
		t.Errorf("reason %q", got)
	}
}

func TestABinaryThatDiesHasFailed(t *testing.T) {
	testenv.RequirePeer(t, "go")
	died := errors.New("signal: killed")
	if p := Read(t.Context(), "example/x", nil, died); !errors.Is(p.Err, died) {
		t.Errorf("without a word: %v", p.Err)
	}
	p := Read(t.Context(), "example/x", []byte("\x16=== RUN   TestHangs\n"), died)
	if p.OK() || p.Count(Fail) != 1 {
		t.Errorf("in the middle of a test: %+v", p)
	}
	p = Read(t.Context(), "example/x", []byte("\x16=== RUN   TestGood\n\x16--- PASS: TestGood (0.00s)\n"), died)
	if p.OK() {
		t.Errorf("after its tests: %+v", p)
	}
}

func TestJUnitCanBeReadBack(t *testing.T) {
	testenv.RequirePeer(t, "go")
	p := Read(t.Context(), "example/x", []byte(printed), errors.New("exit status 1"))
	broken := Package{Path: "example/y", Err: errors.New("it crashed"), Output: "panic: " + strings.Repeat("ä", outputLimit)}
	var out bytes.Buffer
	if err := WriteJUnit(&out, Lane{Name: "root", Packages: []Package{p, broken}}); err != nil {
		t.Fatal(err)
	}
	var back junitSuites
	if err := xml.Unmarshal(out.Bytes(), &back); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	if back.Tests != 5 || back.Failures != 2 || back.Errors != 1 || back.Skipped != 1 || len(back.Suites) != 2 {
		t.Errorf("%+v", back)
	}
	cases := back.Suites[0].Cases
	if f := cases[3].Failure; f == nil || !strings.Contains(f.Text, "got 1 < 2 &") {
		t.Errorf("the failure: %+v", cases[3])
	}
	if s := cases[1].Skipped; s == nil || !strings.Contains(s.Message, "no memory controller") {
		t.Errorf("the skip: %+v", cases[1])
	}
	if e := back.Suites[1].Cases[0].Error; e == nil || e.Message != "it crashed" || !strings.HasSuffix(e.Text, "ä") {
		t.Error("the broken package says nothing of its end")
	}
}

func TestReadDirTellsCutOffFromEnded(t *testing.T) {
	testenv.RequirePeer(t, "go")
	dir := t.TempDir()
	const module = "github.com/sandboxd/sandboxd/"
	for name, text := range map[string]string{
		"tests-good.out": "\x16=== RUN   TestGood\n\x16--- PASS: TestGood (0.25s)\n\x16PASS\n", "tests-good.end": "0 1.5\n",
		"tests-cut.out": "\x16=== RUN   TestGood\n\x16--- PASS: TestGood (0.25s)\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got := ReadDir(t.Context(), dir, []string{module + "tests/good", module + "tests/cut", module + "tests/never"})
	if !got[0].OK() || got[0].Elapsed != 1500*time.Millisecond {
		t.Errorf("ended well: %+v", got[0])
	}
	if got[1].OK() || got[2].OK() {
		t.Errorf("cut off: %v; never begun: %v", got[1].Err, got[2].Err)
	}
}
