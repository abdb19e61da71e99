package resident_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/interpreter/resident"
)

func frame(kind byte, run uint32, payload string) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(len(payload)))
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
			d.Write("stdout", int64(at), []byte(all[at:min(at+size, len(all))]))
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
		d.Write("stdout", 0, data[:n])
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

// A message for which there is no memory is omitted, holds none and is still bounded. The next one
// is read again.
func TestReaderAsksForMemory(t *testing.T) {
	room := 0
	r := resident.Reader{Run: 7, Take: func(n int) bool {
		if room -= n; room < 0 {
			return false
		}
		return true
	}}
	read := func(kind resident.Kind, payload string) (*resident.Message, error) {
		return r.Read(resident.Frame{Kind: kind, Run: 7, Payload: []byte(payload)})
	}
	message := func(kind resident.Kind, pieces ...string) *resident.Message {
		t.Helper()
		for _, p := range pieces[:len(pieces)-1] {
			if m, err := read(resident.KindPiece, p); m != nil || err != nil {
				t.Fatalf("%+v, %v", m, err)
			}
		}
		m, err := read(kind, pieces[len(pieces)-1])
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	result := []string{`{"text":`, `"abc"`, `}`}
	for size := range 15 {
		room = size
		want := "[14 bytes, for which"
		if size == 14 {
			want = "abc"
		}
		if m := message(resident.KindResult, result...); m.Result == nil || !strings.HasPrefix(m.Result.Text, want) {
			t.Errorf("with room for %d bytes: %+v", size, m)
		}
	}
	room = 0
	if m := message(resident.KindError, `{"name":"E",`, `"value":"v"}`); m.Failure == nil || m.Failure.Name != "Omitted" {
		t.Errorf("%+v", m)
	}
	if m := message(resident.KindResult, `{"text":"one frame"}`); m.Result == nil || m.Result.Text != "one frame" {
		t.Errorf("%+v", m)
	}
	for range resident.MaxMessage / resident.MaxFrame {
		if _, err := read(resident.KindPiece, strings.Repeat("x", resident.MaxFrame)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := read(resident.KindPiece, strings.Repeat("x", resident.MaxFrame)); !errors.Is(err, resident.ErrProtocol) {
		t.Error(err)
	}
}

// An error's texts are shortened, whatever their characters take, and stay UTF-8.
func TestLongErrors(t *testing.T) {
	for _, text := range []string{strings.Repeat("x", 3<<20), "x" + strings.Repeat("日", 1<<20)} {
		data := `{"name":"` + text + `","value":"` + text + `","traceback":"` + text + `"}`
		r := resident.Reader{Run: 7}
		for ; len(data) > resident.MaxFrame; data = data[resident.MaxFrame:] {
			if _, err := r.Read(resident.Frame{Kind: resident.KindPiece, Run: 7, Payload: []byte(data[:resident.MaxFrame])}); err != nil {
				t.Fatal(err)
			}
		}
		m, err := r.Read(resident.Frame{Kind: resident.KindError, Run: 7, Payload: []byte(data)})
		if err != nil {
			t.Fatal(err)
		}
		for _, got := range []string{m.Failure.Name, m.Failure.Value, m.Failure.Traceback} {
			if len(got) > 350<<10 || len(got) < 340<<10-8 || !utf8.ValidString(got) || !strings.HasPrefix(got, text[:7]) || !strings.HasSuffix(got, text[len(text)-3:]) {
				t.Errorf("%d bytes: %q", len(got), got[:20])
			}
		}
	}
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
		k, ok := resident.For(name, "key")
		if !ok || k.Language != name || len(k.Argv) == 0 {
			t.Errorf("%s: %+v", name, k.Argv)
		}
	}
	if _, ok := resident.For("cobol", ""); ok {
		t.Error("there is a kernel for cobol")
	}
}

// markedKernel is a kernel whose messages stand between output.
func markedKernel(t testing.TB) resident.Kernel {
	t.Helper()
	k, ok := resident.For("bash", "KEY")
	if !ok {
		t.Fatal("there is no bash")
	}
	return k
}

// Messages are found however the bytes are cut, and what only looks like one is output.
func TestMarkedOutput(t *testing.T) {
	k := markedKernel(t)
	const text = "a\x00KEb\x00KEY:x 7 4\nfailc\x00"
	stdout := text + "\x00KEY:d 7 11\n{\"ok\":true}next"
	for size := 1; size <= len(stdout); size++ {
		s := k.NewSplitter()
		s.Begin(7)
		s.Write("stderr", 0, []byte("err\x00KEY:s 7 0\n"))
		at := int64(14)
		got := map[resident.Kind]string{}
		for i := 0; i < len(stdout); i += size {
			p := stdout[i:min(i+size, len(stdout))]
			s.Write("stdout", at, []byte(p))
			at += int64(len(p))
			for {
				f, ok, err := s.Next()
				if err != nil {
					t.Fatal(err)
				}
				if !ok {
					break
				}
				got[f.Kind] += string(f.Payload)
			}
		}
		want := map[resident.Kind]string{'o': "a\x00KEbc\x00", 'e': "err", 'x': "fail", 'd': `{"ok":true}`}
		if !maps.Equal(got, want) {
			t.Fatalf("in pieces of %d: %q", size, got)
		}
		if place := s.Place(at); place > at || place < at-int64(len("next"))-int64(size) {
			t.Fatalf("in pieces of %d: place %d of %d", size, place, at)
		}
	}
}

// A kernel that ends a run on one stream only, and floods it, is refused before that takes memory.
func TestHalfAnEnd(t *testing.T) {
	k := markedKernel(t)
	for stream, end := range map[string]string{"stdout": "\x00KEY:d 7 2\n{}", "stderr": "\x00KEY:s 7 0\n"} {
		s := k.NewSplitter()
		s.Begin(7)
		flood := []byte(end + strings.Repeat("x", 1<<16))
		at, err := int64(0), error(nil)
		for at < 4*resident.MaxFrame && err == nil {
			s.Write(stream, at, flood)
			at += int64(len(flood))
			for ok := true; ok && err == nil; {
				_, ok, err = s.Next()
			}
			flood = flood[len(flood)-1<<16:]
		}
		if !errors.Is(err, resident.ErrProtocol) {
			t.Errorf("%s: %v after %d bytes", stream, err, at)
		}
	}
}

// Frames lie where their bytes were written until the next write: to take one moves no other,
// however many there are.
func TestFramesAreNotCopied(t *testing.T) {
	const frames, key = 500, "\x00KEY:"
	marked := markedKernel(t)
	var plain, between []byte
	for i := range frames {
		payload := fmt.Sprintf("%04d", i)
		plain = append(append(plain, 0, 0, 0, 4, byte(resident.KindResult), 0, 0, 0, 1), payload...)
		between = fmt.Appendf(between, "%sr 1 4\n%s", key, payload)
	}
	for _, of := range []struct {
		split resident.Splitter
		said  []byte
	}{{new(resident.Decoder), plain}, {marked.NewSplitter(), between}} {
		of.split.Begin(1)
		of.split.Write("stdout", 0, of.said)
		var all [][]byte
		for {
			f, ok, err := of.split.Next()
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			all = append(all, f.Payload)
		}
		for i, p := range all {
			if string(p) != fmt.Sprintf("%04d", i) {
				t.Fatalf("%T: frame %d has become %q", of.split, i, p)
			}
		}
		if len(all) != frames {
			t.Errorf("%T: %d frames", of.split, len(all))
		}
	}
}

func FuzzMarked(f *testing.F) {
	f.Add([]byte("x\x00KEY:d 7 11\n{\"ok\":true}"), []byte("\x00KEY:s 7 0\n"))
	f.Add([]byte("\x00KEY:r 7 99999\n"), []byte("\x00"))
	f.Add([]byte("\x00KEY:d 6 0\n\x00KEY:d 7 0\n"), []byte("\x00KEY:s 6 0\n\x00KEY:s 8 0\n"))
	f.Fuzz(func(t *testing.T, stdout, stderr []byte) {
		k := markedKernel(t)
		s := k.NewSplitter()
		s.Begin(7)
		s.Write("stdout", 0, stdout)
		s.Write("stderr", int64(len(stdout)), stderr)
		size, end := 0, int64(len(stdout)+len(stderr))
		for {
			f, ok, err := s.Next()
			if err != nil {
				if !errors.Is(err, resident.ErrProtocol) {
					t.Fatal(err)
				}
				return
			}
			if !ok {
				break
			}
			if size += len(f.Payload); len(f.Payload) > resident.MaxFrame || int64(size) > end {
				t.Fatalf("frames of %d bytes of %d", size, end)
			}
		}
		if place := s.Place(end); place < 0 || place > end {
			t.Fatalf("place %d of %d", place, end)
		}
	})
}
