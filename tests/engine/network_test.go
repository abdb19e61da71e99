package engine

import (
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/runtime"
)

func TestNetworkSmoke(t *testing.T) {
	testenv.RequireUserNS(t)
	f := newFixture(t)
	d, _ := runtime.As[runtime.Describer](f.Engine)
	t.Log(d.Describe(t.Context()))
	spec := f.NewSpec(t, "net1")
	spec.Network = true
	begin(t, f, spec)
	n, _ := runtime.As[runtime.Networker](f.Engine)
	s, err := n.NetworkSockets(t.Context(), "net1")
	t.Log(s, err)
}
