package host

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// programs runs f for two static programs that do nothing: one of the C library, which the promise
// is about, and the smallest possible one, which shows the cost outside of the kernel best.
func programs(b *testing.B, f func(b *testing.B, bin string)) {
	b.Helper()
	b.Run("libc", func(b *testing.B) {
		dir := b.TempDir()
		src, bin := filepath.Join(dir, "true.c"), filepath.Join(dir, "true")
		if err := os.WriteFile(src, []byte("int main(void) { return 0; }\n"), 0o600); err != nil {
			b.Fatal(err)
		}
		if out, err := exec.Command("cc", "-O2", "-static", "-o", bin, src).CombinedOutput(); err != nil {
			b.Skipf("compile a static program: %v %s", err, out)
		}
		f(b, bin)
	})
	b.Run("tiny", func(b *testing.B) { f(b, staticTrue(b)) })
}

// median runs f b.N times and reports the median, which the promise is about: the mean is the
// machine's noise.
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

// BenchmarkExec is a whole exec through a running init. Of libc's program it is to cost at most
// twice BenchmarkForkExec.
func BenchmarkExec(b *testing.B) {
	programs(b, func(b *testing.B, bin string) {
		b.Helper()
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
	})
}

// BenchmarkWholeExec is BenchmarkExec with Whole.
func BenchmarkWholeExec(b *testing.B) {
	programs(b, func(b *testing.B, bin string) {
		b.Helper()
		s := startInit(b)
		median(b, func() {
			e, err := s.Exec(b.Context(), ExecRequest{Argv: []string{bin}, Env: testEnv, NoStdin: true, Whole: true})
			if err != nil {
				b.Fatal(err)
			}
			if exit, err := e.Stream(b.Context(), func(string, []byte) error { return nil }); err != nil || exit.Code != 0 {
				b.Fatalf("%+v, %v", exit, err)
			}
			_ = e.Close()
		})
	})
}

// BenchmarkForkExec starts the same program on the host and reads its output through pipes.
func BenchmarkForkExec(b *testing.B) {
	programs(b, func(b *testing.B, bin string) {
		b.Helper()
		median(b, func() {
			cmd := exec.Command(bin)
			cmd.Env = testEnv
			if _, err := cmd.Output(); err != nil {
				b.Fatal(err)
			}
		})
	})
}

// BenchmarkForkOnly is the bare fork, exec and wait, without pipes.
func BenchmarkForkOnly(b *testing.B) {
	programs(b, func(b *testing.B, bin string) {
		b.Helper()
		median(b, func() {
			if err := exec.Command(bin).Run(); err != nil {
				b.Fatal(err)
			}
		})
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

// BenchmarkHolder is the search for the process that has a socket, among ten processes with ten
// descriptors each.
func BenchmarkHolder(b *testing.B) {
	s := startInit(b)
	for range 10 {
		e, err := s.Exec(b.Context(), ExecRequest{Argv: []string{"sh", "-c", "exec 3<&0 4<&0 5<&0 6<&0 7<&0 8<&0 9<&0; exec sleep 600"}, Env: testEnv, NoStdin: true})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = e.Close() })
	}
	median(b, func() {
		if _, err := s.Holder(b.Context(), 1); err == nil { // all of them are looked at
			b.Fatal("a process has the socket")
		}
	})
}
