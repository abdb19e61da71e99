package performance

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// BenchmarkWorkspace is the creation of a sandbox that works on a directory of 100,000 files,
// against one without. "more" is the difference of each pair.
func BenchmarkWorkspace(b *testing.B) {
	testenv.RequireUserNS(b)
	d := harness.Start(b, harness.Options{})
	dir := b.TempDir()
	for i := range 1000 {
		sub := filepath.Join(dir, strconv.Itoa(i))
		if err := os.Mkdir(sub, 0o755); err != nil {
			b.Fatal(err)
		}
		for j := range 100 {
			if err := os.WriteFile(filepath.Join(sub, strconv.Itoa(j)), fmt.Append(nil, i, j), 0o644); err != nil {
				b.Fatal(err)
			}
		}
	}
	var st syscall.Stat_t
	if err := syscall.Stat(dir, &st); err != nil {
		b.Fatal(err)
	}
	made := map[string][]time.Duration{}
	create := func(ctx context.Context, name string, req api.CreateSandbox) error {
		began := time.Now()
		s, err := d.TryCreate(ctx, req)
		if err != nil {
			return err
		}
		made[name] = append(made[name], time.Since(began))
		return s.TryDelete(ctx)
	}
	with := api.CreateSandbox{Settings: api.Settings{Workspace: &api.Workspace{Source: dir, Device: st.Dev, Inode: st.Ino}}}
	measure(b, []side{
		{name: "with", run: func() error { return create(b.Context(), "with", with) }},
		{name: "without", run: func() error { return create(b.Context(), "without", api.CreateSandbox{}) }},
	})
	var more []time.Duration
	for i := warmUp; i < len(made["with"]); i++ {
		more = append(more, made["with"][i]-made["without"][i])
	}
	report(b, "with", made["with"][warmUp:])
	report(b, "without", made["without"][warmUp:])
	report(b, "more", more)
}
