package guest

import (
	"os/exec"
	"testing"
)

// BenchmarkExec is a whole exec of a static program that does nothing, through a running init. It is to cost at most twice
// BenchmarkForkExec.
func BenchmarkExec(b *testing.B) {
	bin := staticTrue(b)
	s := startInit(b)
	for b.Loop() {
		e, err := s.Exec(b.Context(), ExecRequest{Argv: []string{bin}, Env: testEnv})
		if err != nil {
			b.Fatal(err)
		}
		if exit, err := e.Stream(b.Context(), func(string, []byte) error { return nil }); err != nil || exit.Code != 0 {
			b.Fatalf("%+v, %v", exit, err)
		}
		_ = e.Close()
	}
}

// BenchmarkForkExec starts the same program on the host and reads its output through the same three pipes.
func BenchmarkForkExec(b *testing.B) {
	bin := staticTrue(b)
	for b.Loop() {
		cmd := exec.Command(bin)
		cmd.Env = testEnv
		if _, err := cmd.Output(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkForkOnly is the bare fork, exec and wait, without pipes.
func BenchmarkForkOnly(b *testing.B) {
	bin := staticTrue(b)
	for b.Loop() {
		if err := exec.Command(bin).Run(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkPing(b *testing.B) {
	s := startInit(b)
	for b.Loop() {
		if err := s.Ping(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}
