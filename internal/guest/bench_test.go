package guest

import (
	"os/exec"
	"slices"
	"testing"
	"time"
)

// median runs f b.N times and reports the median, which is what the promise is about: the mean is the machine's noise.
func median(b *testing.B, f func()) {
	b.Helper()
	var took []time.Duration
	for b.Loop() {
		begun := time.Now()
		f()
		took = append(took, time.Since(begun))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2]), "p50-ns")
}

// BenchmarkExec is a whole exec of a static program that does nothing, through a running init. It is to cost at most twice
// BenchmarkForkExec.
func BenchmarkExec(b *testing.B) {
	bin := staticTrue(b)
	s := startInit(b)
	median(b, func() {
		e, err := s.Exec(b.Context(), ExecRequest{Argv: []string{bin}, Env: testEnv})
		if err != nil {
			b.Fatal(err)
		}
		if exit, err := e.Stream(b.Context(), func(string, []byte) error { return nil }); err != nil || exit.Code != 0 {
			b.Fatalf("%+v, %v", exit, err)
		}
		_ = e.Close()
	})
}

// BenchmarkForkExec starts the same program on the host and reads its output through the same three pipes.
func BenchmarkForkExec(b *testing.B) {
	bin := staticTrue(b)
	median(b, func() {
		cmd := exec.Command(bin)
		cmd.Env = testEnv
		if _, err := cmd.Output(); err != nil {
			b.Fatal(err)
		}
	})
}

// BenchmarkForkOnly is the bare fork, exec and wait, without pipes.
func BenchmarkForkOnly(b *testing.B) {
	bin := staticTrue(b)
	median(b, func() {
		if err := exec.Command(bin).Run(); err != nil {
			b.Fatal(err)
		}
	})
}

func BenchmarkPing(b *testing.B) {
	s := startInit(b)
	median(b, func() {
		if err := s.Ping(b.Context()); err != nil {
			b.Fatal(err)
		}
	})
}
