package performance

import (
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// BenchmarkDiskLimit is a program that writes 100 MiB in files of 1 MiB and removes them, in a
// sandbox with a disk limit of twice that and in one without. It leaves the disk to the kernel.
func BenchmarkDiskLimit(b *testing.B) {
	testenv.RequireUserNS(b)
	d := harness.Start(b, harness.Options{})
	const script = `mkdir d && for i in $(seq 100); do head -c 1048576 /dev/zero >d/$i || exit 1; done && rm -r d`
	write := func(s *harness.Sandbox) func() error {
		return func() error {
			_, err := s.TryExec(b.Context(), api.ExecRequest{Argv: []string{"sh", "-ec", "cd /root; " + script}})
			return err
		}
	}
	limited := d.Create(b, api.CreateSandbox{Limits: api.Limits{Disk: 200 << 20}})
	free := d.Create(b, api.CreateSandbox{})
	compare(b, side{name: "limited", run: write(limited)}, side{name: "free", run: write(free)})
}
