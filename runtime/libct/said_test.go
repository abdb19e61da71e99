package libct

import (
	"strings"
	"testing"
)

// What an init complains of is shown to people: nothing in it obeys, and there is an end to it.
func TestComplaintsAreTamed(t *testing.T) {
	for data, want := range map[string]string{
		"":                              "",
		"\x00\x00\x00":                  "",
		"sandboxd-init: no\n\x00\x00":   ": sandboxd-init: no",
		"one\ntwo\n":                    ": one;two",
		"\x1b[2Jgone\r\x07":             ": ?[2Jgone??",
		"bad \xff\xfe bytes":            ": bad ? bytes",
		"right\u202eto left \u200b.":    ": right?to left ?.",
		strings.Repeat("a", 4096):       ": " + strings.Repeat("a", complaintSize),
		strings.Repeat("a", 999) + "é…": ": " + strings.Repeat("a", 999) + "?",
	} {
		if got := complaint([]byte(data)); got != want {
			t.Errorf("%.40q is told as %.80q, want %.80q", data, got, want)
		}
	}
}
