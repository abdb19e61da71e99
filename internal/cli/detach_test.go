package cli

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/iotest"

	"github.com/sandboxd/sandboxd/api/client"
)

func TestParseKeys(t *testing.T) {
	for text, want := range map[string]string{
		"ctrl-p,ctrl-q": "\x10\x11", "CTRL-P,a": "\x10a", "ctrl-@": "\x00", "ctrl-[,ctrl-\\,ctrl-],ctrl-^,ctrl-_": "\x1b\x1c\x1d\x1e\x1f", "~,.": "~.", "none": "",
	} {
		if got, err := parseKeys(text); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", text, got, err)
		}
	}
	for _, text := range []string{"", ",", "ctrl-", "ctrl-1", "ctrl-pq", "é", "a,,b", "a,a,a,a,a,a,a,a,a,a,a,a,a,a,a,a,a"} {
		if got, err := parseKeys(text); err == nil {
			t.Errorf("%q is %q", text, got)
		}
	}
}

// Everything that is typed arrives but the sequence itself, however it comes in pieces.
func TestKeyReader(t *testing.T) {
	for _, tc := range []struct {
		keys, typed, want string
		detached          bool
	}{
		{"\x10\x11", "ab\x10\x11cd", "ab", true},
		{"\x10\x11", "\x10\x11", "", true},
		{"\x10\x11", "a\x10b\x11", "a\x10b\x11", false},
		{"\x10\x11", "a\x10\x10\x11", "a\x10", true},
		{"\x10\x11", "a\x10", "a\x10", false}, // stdin ends within it
		{"aab", "aaab", "a", true},
		{"aab", "aaxaac", "aaxaac", false},
		{"abac", "ababac", "ab", true},
		{"q", "xyq", "xy", true},
	} {
		for name, wrap := range map[string]func(io.Reader) io.Reader{
			"at once": func(r io.Reader) io.Reader { return r }, "byte by byte": iotest.OneByteReader, "with the end": iotest.DataErrReader,
		} {
			got, err := io.ReadAll(&keyReader{r: wrap(bytes.NewReader([]byte(tc.typed))), keys: []byte(tc.keys)})
			if string(got) != tc.want || errors.Is(err, client.ErrDetached) != tc.detached {
				t.Errorf("%q of %q %s: %q, %v", tc.keys, tc.typed, name, got, err)
			}
		}
	}
}

// Nothing is lost or made up, whatever is typed.
func FuzzKeyReader(f *testing.F) {
	f.Add([]byte("\x10\x11"), []byte("ab\x10\x11cd"))
	f.Add([]byte("aab"), []byte("aaaab"))
	f.Fuzz(func(t *testing.T, keys, typed []byte) {
		if len(keys) == 0 || len(keys) > maxKeys {
			return
		}
		got, err := io.ReadAll(&keyReader{r: iotest.HalfReader(bytes.NewReader(typed)), keys: keys})
		before, _, found := bytes.Cut(typed, keys)
		if found != errors.Is(err, client.ErrDetached) || !bytes.Equal(got, before) {
			t.Errorf("%q of %q: %q, %v", keys, typed, got, err)
		}
	})
}
