package cli

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode"

	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// Printed JSON has no effect on a terminal, and reads back unchanged.
func TestJSONIsSafeForATerminal(t *testing.T) {
	const hostile = "a\x1b[2J\u009b2J\x7f\u202eb\tc\n<&>\u00e9"
	var b strings.Builder
	if err := cmdline.PrintJSON(&b, map[string]any{"text": hostile, "list": []int{1}}); err != nil {
		t.Fatal(err)
	}
	for _, r := range b.String() {
		if r != '\n' && (unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r)) {
			t.Errorf("%q is printed", r)
		}
	}
	var back struct{ Text string }
	if err := json.Unmarshal([]byte(b.String()), &back); err != nil || back.Text != hostile || !strings.Contains(b.String(), "<&>\u00e9") {
		t.Errorf("%q, %v", b.String(), err)
	}
}
