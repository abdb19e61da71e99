package output

import (
	"testing"
	"unicode/utf8"
)

func TestBufferedOutput(t *testing.T) {
	for name, tc := range map[string]struct {
		limit     int
		writes    []string
		text      string
		bytes     []byte
		truncated bool
	}{
		"nothing":               {10, nil, "", nil, false},
		"text":                  {10, []string{"a", "ä"}, "aä", nil, false},
		"character in two":      {10, []string{"\xc3", "\xa4"}, "ä", nil, false},
		"exactly the limit":     {3, []string{"abc"}, "abc", nil, false},
		"more than the limit":   {3, []string{"ab", "cd", "ef"}, "abc", nil, true},
		"not text":              {10, []string{"a\xffb"}, "a\uFFFDb", []byte("a\xffb"), false},
		"cut within character":  {4, []string{"abcä"}, "abc", nil, true},
		"cut within four bytes": {4, []string{"a\U0001F600"}, "a", nil, true},
		"not text, cut":         {3, []string{"\xff\xfe\xfd\xfc"}, "\uFFFD", []byte("\xff\xfe\xfd"), true},
	} {
		t.Run(name, func(t *testing.T) {
			h := Head{Limit: tc.limit}
			for _, w := range tc.writes {
				h.write([]byte(w))
			}
			text, bytes := h.Result()
			if text != tc.text || string(bytes) != string(tc.bytes) || h.Truncated != tc.truncated {
				t.Errorf("%q, %q, %v", text, bytes, h.Truncated)
			}
		})
	}
}

func TestEventIsTextWhereItIsText(t *testing.T) {
	if e := Event("stdout", []byte("ä")); e.Text != "ä" || e.Data != nil {
		t.Errorf("%+v", e)
	}
	if e := Event("stderr", []byte("\xc3")); e.Text != "" || string(e.Data) != "\xc3" || e.Stream != "stderr" {
		t.Errorf("%+v", e)
	}
}

// Wherever a text is cut, only the beginning of a character is held back.
func TestTail(t *testing.T) {
	const text = "aé€😀z\u0800\U0010ffff"
	for i := range len(text) + 1 {
		n := Tail([]byte(text[:i]))
		if whole := text[:i-n]; n > 3 || !utf8.ValidString(whole) {
			t.Errorf("%q: %d", text[:i], n)
		}
	}
	for s, want := range map[string]int{"": 0, "\xff": 0, "a\x80": 0, "\x80\x80\x80\x80": 0, "\xc3": 1, "\xe2\x82": 2, "\xf0\x9f\x98": 3, "\xc3(": 0, "\xed\xa0": 0} {
		if got := Tail([]byte(s)); got != want {
			t.Errorf("%q: %d, want %d", s, got, want)
		}
	}
}
