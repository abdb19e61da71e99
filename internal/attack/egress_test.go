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
	attacks := []string{UpName}
	for _, a := range Egress() {
		if noWay[a.Name] || os.Geteuid() != 0 && strings.HasPrefix(a.Name, "egress-sysfs-") { // see control
			continue
		}
		attacks = append(attacks, a.Name)
	}
	all, err := Controls(t.Context(), "/proc/self/exe", attacks...)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range attacks {
		t.Run(name, func(t *testing.T) {
			if c := all[name]; !c.Worked {
				t.Errorf("it does not work: %s", c.Found)
			}
		})
	}
}
