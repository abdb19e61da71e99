package daemon_test

import (
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/daemon/daemontest"
	"github.com/sandboxd/sandboxd/internal/service/servicetest"
)

// BenchmarkExecTrue measures the cost of an exec beyond fork and exec: HTTP, the lease, the guest
// protocol.
func BenchmarkExecTrue(b *testing.B) {
	r := daemontest.New(b, servicetest.RealInit(b)).Start()
	sb, err := r.API().CreateSandbox(b.Context(), api.CreateSandbox{})
	if err != nil {
		b.Fatal(err)
	}
	c := client.New(r.D.Socket())
	defer c.Close()
	for b.Loop() {
		if res, err := c.Exec(b.Context(), sb.ID, api.ExecRequest{Argv: []string{"/bin/true"}}); err != nil || res.Exit.Code != 0 {
			b.Fatal(res, err)
		}
	}
}

func BenchmarkCreateAndDelete(b *testing.B) {
	r := daemontest.New(b, nil).Start()
	for b.Loop() {
		sb, err := r.API().CreateSandbox(b.Context(), api.CreateSandbox{})
		if err != nil {
			b.Fatal(err)
		}
		if err := r.API().DeleteSandbox(b.Context(), sb.ID); err != nil {
			b.Fatal(err)
		}
	}
}
