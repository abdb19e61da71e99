package attack

import (
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

func TestEgressControls(t *testing.T) {
	testenv.RequireUserNS(t)
	for _, a := range Egress() {
		t.Run(a.Name, func(t *testing.T) {
			worked, found, err := Control(t.Context(), "/proc/self/exe", a.Name)
			if !worked || err != nil {
				t.Errorf("%v %s %v", worked, found, err)
			}
		})
	}
}
