package daemon

import (
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
)

// What an exec costs beyond fork and exec: HTTP, the lease, the guest protocol.
func BenchmarkExecTrue(b *testing.B) {
	r := newBench(b, realInit(b)).start()
	sb, err := r.d.Service().CreateSandbox(b.Context(), api.CreateSandbox{})
	if err != nil {
		b.Fatal(err)
	}
	c := client.New(r.d.Socket())
	defer c.Close()
	for b.Loop() {
		if res, err := c.Exec(b.Context(), sb.ID, api.ExecRequest{Argv: []string{"/bin/true"}}); err != nil || res.Exit.Code != 0 {
			b.Fatal(res, err)
		}
	}
}

func BenchmarkCreateAndDelete(b *testing.B) {
	r := newBench(b, nil).start()
	for b.Loop() {
		sb, err := r.d.Service().CreateSandbox(b.Context(), api.CreateSandbox{})
		if err != nil {
			b.Fatal(err)
		}
		if err := r.d.Service().DeleteSandbox(b.Context(), sb.ID); err != nil {
			b.Fatal(err)
		}
	}
}
