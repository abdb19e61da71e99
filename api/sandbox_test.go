package api

import "testing"

// A gateway serves each mode that leads out, and members of named networks, but no guest: its
// connections end at the gateway of the owner.
func TestHasGateway(t *testing.T) {
	joined := []string{"front"}
	for _, tt := range []struct {
		network Network
		want    bool
	}{
		{Network{}, false},
		{Network{Mode: NetworkNone}, false},
		{Network{Mode: NetworkFull}, true},
		{Network{Mode: NetworkEgress}, true},
		{Network{Mode: NetworkSandbox, Sandbox: "owner"}, false},
		{Network{Join: joined}, true},
		{Network{Mode: NetworkNone, Join: joined}, true},
		{Network{Mode: NetworkEgress, Join: joined}, true},
		{Network{Mode: NetworkSandbox, Join: joined}, false}, // refused, but never served twice
	} {
		if got := tt.network.HasGateway(); got != tt.want {
			t.Errorf("%+v: %v", tt.network, got)
		}
	}
}
