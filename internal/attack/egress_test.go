package attack

import (
	"os"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// noWay lists attacks that work nowhere: a namespace that is its packets' only host does not route
// them further. They show that the options are refused.
var noWay = map[string]bool{"egress-source-route": true, "egress-segment-route6": true}

// Each attack on a network works where neither rules nor gateway hold it.
func TestEgressControls(t *testing.T) {
	testenv.RequireUserNS(t)
	for _, a := range Egress() {
		if noWay[a.Name] || os.Geteuid() != 0 && strings.HasPrefix(a.Name, "egress-sysfs-") { // see control
			continue
		}
		t.Run(a.Name, func(t *testing.T) {
			if worked, found, err := Control(t.Context(), "/proc/self/exe", a.Name); !worked || err != nil {
				t.Errorf("it does not work: %s %v", found, err)
			}
		})
	}
	if worked, found, err := Control(t.Context(), "/proc/self/exe", UpName); !worked || err != nil {
		t.Errorf("%s: %s %v", UpName, found, err)
	}
}
