package resident_test

import (
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/interpreter/resident"
)

func frame(kind byte, run uint32, payload string) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(len(payload))) //nolint:gosec // small
	b = append(b, kind)
	b = binary.BigEndian.AppendUint32(b, run)
	return append(b, payload...)
}

// Frames come out as they went in, however the bytes are cut.
func TestDecoderOfPieces(t *testing.T) {
	all := string(frame('o', 7, "one")) + string(frame('r', 7, `{"text":"x","json":{"a":[1]}}`)) + string(frame('d', 7, `{"ok":true}`))
	for size := 1; size <= len(all); size++ {
		var d resident.Decoder
		r := resident.Reader{Run: 7}
		var got []string
		for at := 0; at < len(all); at += size {
			d.Write([]byte(all[at:min(at+size, len(all))]))
			for {
				f, ok, err := d.Next()
				if err != nil {
					t.Fatal(err)
				}
				if !ok {
					break
				}
				m, err := r.Read(f)
				switch {
				case err != nil:
					t.Fatal(err)
				case m.Stdout != nil:
					got = append(got, string(m.Stdout))
				case m.Result != nil:
					got = append(got, m.Result.Text)
				case m.Done != nil:
					got = append(got, "done")
				}
			}
		}
		if strings.Join(got, " ") != "one x done" || d.Rest() != 0 {
			t.Fatalf("in pieces of %d: %q", size, got)
		}
	}
}

func TestReaderRefuses(t *testing.T) {
	for name, bytes := range map[string][]byte{
		"another run":              frame('o', 8, "x"),
		"hello in a run":           frame('h', 7, "{}"),
		"an unknown type":          frame('z', 7, ""),
		"a long frame":             {0, 0xff, 0, 0, 'o', 0, 0, 0, 7},
		"no JSON":                  frame('r', 7, "text"),
		"two values":               frame('d', 7, `{"ok":true}{}`),
		"an unknown field":         frame('d', 7, `{"fine":true}`),
		"a result of another type": frame('r', 7, `{"png":5}`),
		"no UTF-8":                 frame('x', 7, "{\"name\":\"\xff\"}"),
		"an empty piece":           frame('+', 7, ""),
		"output in pieces":         append(frame('+', 7, "x"), frame('o', 7, "x")...),
	} {
		if _, err := readAll(bytes, 7); !errors.Is(err, resident.ErrProtocol) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// readAll reads the frames of a run until an error or its end, and returns the number of bytes of
// its messages.
func readAll(data []byte, run uint32) (size int, err error) {
	var d resident.Decoder
	r := resident.Reader{Run: run}
	for len(data) > 0 {
		n := min(len(data), 1000)
		d.Write(data[:n])
		data = data[n:]
		for {
			f, ok, err := d.Next()
			if err != nil {
				return size, err
			}
			if !ok {
				break
			}
			m, err := r.Read(f)
			switch {
			case err != nil:
				return size, err
			case m == nil:
				continue
			case m.Result != nil:
				size += len(m.Result.Text)
			case m.Failure != nil:
				size += len(m.Failure.Value)
			case m.Done != nil:
				if m.Done.CPUMS < 0 || m.Done.MemoryPeak < 0 || m.Done.Count < 0 {
					return size, errors.New("impossible usage")
				}
				return size, nil
			}
			size += len(m.Stdout) + len(m.Stderr)
		}
		if d.Rest() > resident.MaxFrame+2000 {
			return size, errors.New("the decoder holds more than a frame")
		}
	}
	return size, nil
}

func FuzzReader(f *testing.F) {
	f.Add(append(frame('o', 7, "x"), frame('d', 7, `{"ok":true}`)...))
	f.Add(append(frame('+', 7, `{"text":`), frame('r', 7, `"x"}`)...))
	f.Add(frame('x', 7, `{"name":"E","value":"v","traceback":"t"}`))
	f.Add([]byte{0, 0, 0, 1, 'o'})
	f.Fuzz(func(t *testing.T, data []byte) {
		size, err := readAll(data, 7)
		if err != nil && !errors.Is(err, resident.ErrProtocol) {
			t.Fatal(err)
		}
		// U+FFFD and escapes of JSON make text longer, by at most six times.
		if size > 6*len(data) {
			t.Fatalf("%d bytes of %d", size, len(data))
		}
	})
}

func TestKernelsAreWhole(t *testing.T) {
	for _, name := range resident.Languages() {
		k, ok := resident.For(name)
		if !ok || k.Language != name || len(k.Argv) == 0 || len(k.Stdin) == 0 {
			t.Errorf("%s: %+v", name, k.Argv)
		}
	}
	if _, ok := resident.For("cobol"); ok {
		t.Error("there is a kernel for cobol")
	}
}
