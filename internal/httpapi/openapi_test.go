package httpapi

import (
	"testing"

	"github.com/sandboxd/sandboxd/api/openapi"
)

// The OpenAPI document has the routes of the daemon, and no others.
func TestOpenAPIHasEveryRoute(t *testing.T) {
	documented := map[string]bool{}
	for _, o := range openapi.Operations {
		documented[o.Method+" "+o.Path] = true
	}
	for _, r := range routes {
		name := r.method + " " + r.pattern
		if r.method != anyMethod && !documented[name] {
			t.Errorf("%s is not in api/openapi", name)
		}
		delete(documented, name)
	}
	for name := range documented {
		t.Errorf("%s is documented and does not exist", name)
	}
}
