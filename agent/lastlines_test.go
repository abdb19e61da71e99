package agent

import (
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
)

func TestLastLines(t *testing.T) {
	for written, want := range map[string][]string{
		"":                         nil,
		"\n\r\n":                   nil,
		"a":                        {"a"},
		"a\nb\n\nc\n":              {"b", "", "c"},
		"1%\r2%\r3%":               {"3%"},
		"dos\r\nline\r\n":          {"dos", "line"},
		"\x1b[1;31mred\x1b[m\x07!": {`red\x07!`},
		"\x1b]0;title\x07x\xff":    {"x\uFFFD"},
		"\u202etxt.exe":            {`\u202etxt.exe`},
	} {
		if diff := cmp.Diff(want, LastLines([]byte(written), 3)); diff != "" {
			t.Errorf("%q (-want +got):\n%s", written, diff)
		}
	}
	if got := LastLines([]byte(strings.Repeat("x", 1<<20)), 1); len(got) != 1 || len(got[0]) > 2*maxLastLine {
		t.Errorf("%d lines", len(got))
	}
}

func FuzzLastLines(f *testing.F) {
	f.Add([]byte("a\nb\r\x1b[2Jc\x00\xff\u202e"))
	f.Fuzz(func(t *testing.T, written []byte) {
		got := LastLines(written, 4)
		if len(got) > 4 {
			t.Fatalf("%d lines", len(got))
		}
		for _, line := range got {
			if i := strings.IndexFunc(line, func(r rune) bool { return r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r)) }); i >= 0 {
				t.Errorf("%q in %q", line[i:], line)
			}
		}
	})
}
