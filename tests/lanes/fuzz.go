package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/tests/testresult"
	"github.com/sandboxd/sandboxd/tests/testtree"
)

// fuzzLane is where the fuzz targets look for new inputs; the other lanes run them with those in the tree.
const fuzzLane = "fuzz"

// fuzzed are the targets that read what comes from strangers, by package: references, archives, layers and Dockerfiles, both
// protocols, whose other side may have been taken over, what models answer, and tasks. `make fuzz` runs all there are, for longer.
// Together they take no longer than the lanes beside them.
var fuzzed = []struct {
	dir     string
	targets []string
	// How long each of them looks, and how often it tries to make an input smaller that is new: by default for a minute, in
	// which nothing else is tried. A packet is small.
	time     time.Duration
	minimize string
}{
	{"image", []string{"FuzzImport"}, 6 * time.Second, "2s"},
	{"image/reference", []string{"FuzzParse"}, 6 * time.Second, "2s"},
	{"image/layer", []string{"FuzzApply", "FuzzPieces"}, 6 * time.Second, "2s"},
	{"image/build", []string{"FuzzDockerfile"}, 6 * time.Second, "2s"},
	{"internal/guest/host", []string{"FuzzHostDecode", "FuzzHostAnswers"}, 4 * time.Second, "20x"},
	{"internal/guest/inside", []string{"FuzzInitDecode"}, 4 * time.Second, "20x"},
	{"internal/launcher", []string{"FuzzLauncherServe", "FuzzLauncherAnswers"}, 4 * time.Second, "20x"},
	{"agent/llm", []string{
		"FuzzChatStream", "FuzzResponsesStream", "FuzzAnthropicStream", "FuzzParseCompletion", "FuzzParseResponses", "FuzzParseAnthropic", "FuzzReadRecording",
	}, 2 * time.Second, "20x"},
	{"agent/bench", []string{"FuzzTask", "FuzzScores", "FuzzLedger"}, 2 * time.Second, "20x"},
}

// runFuzz compiles and runs the fuzz targets one after another, at the lowest priority beside the lanes of this machine, which
// mostly wait, and as the ordinary user where there is one: what they find may write where it should not.
func runFuzz(ctx context.Context, o options, l *lane, results *results) error {
	tree := filepath.Join(o.workDir, "tree-"+l.Name)
	tmp := filepath.Join(o.workDir, l.Name+"-tmp")
	if err := testtree.Copy(ctx, tree); err != nil {
		return err
	}
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return err
	}
	if err := l.own(ctx, tree, tmp); err != nil {
		return err
	}
	for _, f := range fuzzed {
		r := testresult.Package{Path: module + "/" + f.dir}
		binary := filepath.Join(o.workDir, testresult.FileName(r.Path)+".fuzz")
		// What -fuzz would do, to our own packages alone: all that they import, the models' SDKs too, took minutes to be compiled anew.
		out, err := lowly(ctx, "go", "test", "-c", "-vet=off", "-trimpath", "-buildvcs=false", "-p", "1", "-tags", testtree.Tags,
			"-gcflags", module+"/...=-d=libfuzzer", "-o", binary, "./"+f.dir).CombinedOutput()
		if r.Output, r.Err = string(out), err; err == nil {
			for _, target := range f.targets {
				one := fuzz(ctx, l, r.Path, binary, filepath.Join(tree, f.dir), tmp, target, "-test.fuzztime", f.time.String(), "-test.fuzzminimizetime", f.minimize)
				r.Tests, r.Elapsed = append(r.Tests, one.Tests...), r.Elapsed+one.Elapsed
				r.Err, r.Output = errors.Join(r.Err, one.Err), r.Output+one.Output
			}
		}
		results.add(l, r)
	}
	return ctx.Err()
}

// lowly is a command at the lowest priority: it takes what the tests leave. Where the kernel groups processes by session, nice
// counts among those of one session only, so it gets one of its own, and the session the lowest priority too (sched(7)).
func lowly(ctx context.Context, name string, args ...string) *exec.Cmd {
	const script = `echo 19 2>/dev/null >/proc/self/autogroup; exec nice -n 19 "$@"`
	cmd := exec.CommandContext(ctx, "sh", append([]string{"-c", script, "sh", name}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd
}

// failingInput is how the testing package says where it has put one.
var failingInput = regexp.MustCompile(`Failing input written to (\S+)`)

// timeUp is all that is said of a target that was busy when its time was up: a fault of Go before 1.27, golang.org/issue/75804.
var timeUp = regexp.MustCompile(`(?m)^--- FAIL: \w+ \([0-9.]+s\)\n    context deadline exceeded$`)

// fuzz runs one target. An input that fails is printed: it belongs into the package's testdata/fuzz.
func fuzz(ctx context.Context, l *lane, path, binary, dir, tmp, target string, bounds ...string) testresult.Package {
	args := []string{
		"-test.v", "-test.run", "^$", "-test.paniconexit0", "-test.fuzz", "^" + target + "$", "-test.parallel", "1",
		"-test.fuzzcachedir", filepath.Join(tmp, target),
	}
	test := lowly(ctx, binary, append(args, bounds...)...)
	test.Dir = dir
	test.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=" + tmp, "TMPDIR=" + tmp, "LANG=C.UTF-8"}
	test.SysProcAttr.Credential = l.credential()
	// Its workers too.
	test.Cancel = func() error { return syscall.Kill(-test.Process.Pid, syscall.SIGINT) }
	test.WaitDelay = 10 * time.Second
	began := time.Now()
	out, err := test.CombinedOutput()
	m := failingInput.FindSubmatch(out)
	switch {
	case m != nil:
		input, err := os.ReadFile(filepath.Join(dir, string(m[1])))
		out = fmt.Appendf(out, "%s, %v:\n%s\n", m[1], err, input)
	case err != nil && ctx.Err() == nil && timeUp.Match(out):
		return testresult.Package{Path: path, Elapsed: time.Since(began), Tests: []testresult.Test{{Name: target, Outcome: testresult.Pass}}}
	}
	r := testresult.Read(ctx, path, out, err)
	r.Elapsed = time.Since(began)
	if blind := []byte("not built with coverage instrumentation"); r.Err == nil && bytes.Contains(out, blind) {
		r.Err = errors.New("it looks for inputs blindly: the compiler knows the flag no more by which it counts what is reached")
	}
	return r
}
