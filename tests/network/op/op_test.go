package op

import (
	"os"
	"testing"
)

// A call of a test must not change the network of the machine.
func TestCallsStayOutOfTheTestsNamespace(t *testing.T) {
	here, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for name := range Calls() {
		if err := call(name, here); err == nil || err.Error() != "the thread is in the network namespace of the test" {
			t.Errorf("%s: %v", name, err)
		}
		if err := call(name, ""); err == nil {
			t.Errorf("%s was made without a namespace to stay out of", name)
		}
	}
}
