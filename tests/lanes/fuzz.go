package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"time"

	"github.com/sandboxd/sandboxd/tests/testresult"
	"github.com/sandboxd/sandboxd/tests/testtree"
)

// fuzzLane is where the fuzz targets look for new inputs; the other lanes run them with those in the tree.
const fuzzLane = "fuzz"

// fuzzTime is how long each target looks.
const fuzzTime = time.Minute

// fuzzed are the targets that read what comes from strangers, by package: references, archives, layers and
// Dockerfiles.
var fuzzed = []struct {
	dir     string
	targets []string
}{
	{"image", []string{"FuzzParse", "FuzzImport"}},
	{"image/layer", []string{"FuzzApply"}},
	{"image/build", []string{"FuzzDockerfile"}},
}

// runFuzz runs the fuzz targets one after another, at the lowest priority: beside the lanes of this machine, which mostly
// wait. An input that fails is left in the package's testdata, as `go test -fuzz` does, and printed.
func runFuzz(ctx context.Context, l *lane, results *results) error {
	for _, f := range fuzzed {
		r := testresult.Package{Path: module + "/" + f.dir}
		for _, target := range f.targets {
			one := fuzzOne(ctx, f.dir, target)
			r.Tests, r.Elapsed = append(r.Tests, one.Tests...), r.Elapsed+one.Elapsed
			if one.Err != nil {
				r.Err, r.Output = fmt.Errorf("%s: %w", target, one.Err), one.Output
			}
		}
		results.add(l, r)
	}
	return ctx.Err()
}

// failingInput is how the go tool says where it has put one.
var failingInput = regexp.MustCompile(`Failing input written to (\S+)`)

// timeUp is all that is said of a target that was busy when its time was up: a fault of Go before 1.27, golang.org/issue/75804.
var timeUp = regexp.MustCompile(`(?m)^--- FAIL: \w+ \([0-9.]+s\)\n    context deadline exceeded$`)

func fuzzOne(ctx context.Context, dir, target string) testresult.Package {
	test := exec.CommandContext(ctx, "nice", "-n", "19", "go", "test", "-v", "-buildvcs=false", "-tags", testtree.Tags, "-run", "^$",
		"-fuzz", "^"+target+"$", "-fuzztime", fuzzTime.String(), "-fuzzminimizetime", "2s", "-parallel", "1", "./"+dir)
	began := time.Now()
	out, err := test.CombinedOutput()
	path := module + "/" + dir
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
	return r
}
