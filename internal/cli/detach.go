package cli

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// defaultDetachKeys are Docker's.
const defaultDetachKeys = "ctrl-p,ctrl-q"

// detachKeysVariable is the environment variable with the keys of all commands.
const detachKeysVariable = "SANDBOXD_DETACH_KEYS"

// detachFlags hold the keys that leave a program on a terminal alone.
type detachFlags struct {
	keys string
}

func (o *detachFlags) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.keys, "detach-keys", "", "`keys` that leave the program and its terminal, such as ctrl-x,q, or none (default: $"+detachKeysVariable+", else "+defaultDetachKeys+")")
}

// tellDetached says how to come back to a program that has been left alone.
func tellDetached(w io.Writer, sandbox, exec string, interactive bool) {
	words := []string{"sandboxd attach"}
	if interactive {
		words = append(words, "-i")
	}
	words = append(words, cmdline.Printable(sandbox))
	if exec != api.MainExec {
		words = append(words, cmdline.Printable(exec))
	}
	fmt.Fprintf(w, "sandboxd: detached; the program goes on, see: %s\n", strings.Join(words, " "))
}

// sequence returns the bytes of the keys; nil means none.
func (o *detachFlags) sequence(getenv func(string) string) ([]byte, error) {
	from, text := "--detach-keys", o.keys
	if text == "" {
		from, text = detachKeysVariable, cmp.Or(getenv(detachKeysVariable), defaultDetachKeys)
	}
	keys, err := parseKeys(text)
	if err != nil {
		return nil, cmdline.Usagef("%s %q: %w", from, text, err)
	}
	return keys, nil
}

// maxKeys bounds a sequence: its keys are withheld from the program while it may go on.
const maxKeys = 16

// parseKeys reads keys in Docker's format: characters and ctrl-X, separated by commas; "none" means
// none.
func parseKeys(text string) ([]byte, error) {
	if text == "none" {
		return nil, nil
	}
	var keys []byte
	for key := range strings.SplitSeq(text, ",") {
		control, isControl := strings.CutPrefix(strings.ToLower(key), "ctrl-")
		switch {
		case len(key) == 1 && key[0] < 0x80:
			keys = append(keys, key[0])
		case isControl && len(control) == 1 && (control[0] >= 'a' && control[0] <= 'z' || strings.IndexByte("@[\\]^_", control[0]) >= 0):
			keys = append(keys, control[0]&0x1f)
		default:
			return nil, fmt.Errorf("%q is neither a character nor ctrl- with a letter or one of @ [ \\ ] ^ _", key)
		}
	}
	if len(keys) > maxKeys {
		return nil, fmt.Errorf("%d keys, more than %d", len(keys), maxKeys)
	}
	return keys, nil
}

// keyReader reads stdin up to the detach keys, and then returns [client.ErrDetached]. Keys that may
// begin the sequence are withheld until it is complete or broken.
type keyReader struct {
	r       io.Reader
	keys    []byte
	out     []byte // to be returned
	pending []byte // a beginning of keys, withheld
	err     error  // comes after out
}

func (k *keyReader) Read(p []byte) (int, error) {
	for len(k.out) == 0 {
		if k.err != nil {
			return 0, k.err
		}
		n, err := k.r.Read(p)
		k.take(p[:n])
		if err != nil && k.err == nil {
			k.out, k.pending, k.err = append(k.out, k.pending...), nil, err
		}
	}
	n := copy(p, k.out)
	k.out = k.out[n:]
	return n, nil
}

// take sorts bytes into out and pending.
func (k *keyReader) take(p []byte) {
	for _, b := range p {
		k.pending = append(k.pending, b)
		for !bytes.HasPrefix(k.keys, k.pending) {
			k.out, k.pending = append(k.out, k.pending[0]), k.pending[1:]
		}
		if len(k.pending) == len(k.keys) {
			k.pending, k.err = nil, client.ErrDetached
			return
		}
	}
}

// withKeys makes the keys leave the program, if a person types on f.
func withKeys(r io.Reader, keys []byte, f *os.File) io.Reader {
	if len(keys) == 0 || !cmdline.IsTerminal(f) {
		return r
	}
	return &keyReader{r: r, keys: keys}
}
