package layer_test

import (
	"archive/tar"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/image/layer"
)

// written is data that a test writes to a file at an offset.
type written struct {
	at   int64
	text string
}

func sparseFile(t *testing.T, path string, size int64, all ...written) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, w := range all {
		if _, err := f.WriteAt([]byte(w.text), w.at); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
}

// through passes a directory through a snapshot's stream. It returns the unpacked tree, the stream,
// and the counts of both ends.
func through(t *testing.T, upper string) (dir string, stream []byte, read, applied layer.Result) {
	t.Helper()
	var buf bytes.Buffer
	read, err := layer.Diff(&buf, []layer.Overlay{{At: ".", Upper: open(t, upper)[0]}}, layer.DiffOptions{Holes: true})
	if err != nil {
		t.Fatal(err)
	}
	dir = t.TempDir()
	applied, err = layer.Apply(open(t, dir)[0], bytes.NewReader(buf.Bytes()), layer.Options{SingleID: true, FromDiff: true})
	if err != nil {
		t.Fatal(err)
	}
	return dir, buf.Bytes(), read, applied
}

// rereadHoles returns the stream of an unpacked tree.
func rereadHoles(t *testing.T, dir string) []byte {
	t.Helper()
	var buf bytes.Buffer
	if _, err := layer.Diff(&buf, []layer.Overlay{{At: ".", Upper: open(t, dir)[0]}}, layer.DiffOptions{Holes: true, Stored: true}); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func blocks(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

// bytesRead returns the bytes that this process has read so far, those of parallel tests included.
func bytesRead(t *testing.T) (n int64) {
	t.Helper()
	data, err := os.ReadFile("/proc/self/io")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscanf(string(data), "rchar: %d", &n); err != nil {
		t.Fatalf("%q: %v", data, err)
	}
	return n
}

// Unwritten parts cost nothing: they are neither in the stream nor on disk, and are not read.
func TestHolesOfASnapshotAreNotCopied(t *testing.T) {
	const size = 10 << 40 // of 10 TiB no machine reads the zeros while a test waits
	upper := t.TempDir()
	name := filepath.Join(upper, "disk.img")
	sparseFile(t, name, size, written{0, "boot"}, written{5<<40 + 123, strings.Repeat("middle", 1000)}, written{size - 3, "end"})
	sparseFile(t, filepath.Join(upper, "empty.img"), 1<<40)
	before := bytesRead(t)
	dir, stream, read, applied := through(t, upper)
	if n := bytesRead(t) - before; n > 1<<30 {
		t.Errorf("%d bytes were read", n)
	}
	if len(stream) > 1<<20 {
		t.Errorf("the stream has %d bytes", len(stream))
	}
	if read.Size != applied.Size || read.Size > 4*64<<10 || read.Entries != applied.Entries {
		t.Errorf("read %+v, applied %+v", read, applied)
	}
	for _, name := range []string{"disk.img", "empty.img"} {
		if got := blocks(t, filepath.Join(dir, name)); got > 1<<20 {
			t.Errorf("%s takes %d bytes of disk", name, got)
		}
	}
	f, err := os.Open(filepath.Join(dir, "disk.img"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if fi, err := f.Stat(); err != nil || fi.Size() != size {
		t.Errorf("size: %v, %v", fi, err)
	}
	for _, w := range []written{{0, "boot\x00"}, {5<<40 + 120, "\x00\x00\x00middle"}, {5<<40 + 123 + 5994, "middle\x00\x00"}, {size - 5, "\x00\x00end"}} {
		got := make([]byte, len(w.text))
		if _, err := f.ReadAt(got, w.at); err != nil || string(got) != w.text {
			t.Errorf("at %d: %q, %v; want %q", w.at, got, err, w.text)
		}
	}
	if !bytes.Equal(stream, rereadHoles(t, dir)) {
		t.Error("what was unpacked reads as another stream")
	}
}

// The stream depends on a file's content, not on its blocks on disk: a snapshot is compared with
// the digest of its unpacked tree.
func TestStreamDoesNotTellHolesFromZeros(t *testing.T) {
	const size = 4<<20 + 12345
	var streams [][]byte
	for _, zeros := range []string{"", strings.Repeat("\x00", 300<<10), strings.Repeat("\x00", size-(1<<20))} {
		upper := t.TempDir()
		name := filepath.Join(upper, "f")
		sparseFile(t, name, size, written{1 << 20, zeros}, written{3 << 20, "x"})
		at := time.Unix(1, 0)
		for _, name := range []string{name, upper} {
			if err := os.Chtimes(name, at, at); err != nil {
				t.Fatal(err)
			}
		}
		dir, stream, _, _ := through(t, upper)
		if again := rereadHoles(t, dir); !bytes.Equal(stream, again) {
			t.Error("what was unpacked reads as another stream")
		}
		streams = append(streams, stream)
	}
	for _, stream := range streams[1:] {
		if !bytes.Equal(streams[0], stream) {
			t.Error("zeros and holes make different streams")
		}
	}
	if len(streams[0]) > 256<<10 {
		t.Errorf("the stream has %d bytes", len(streams[0]))
	}
}

// Files of many pieces, of about as many as the limits, and without any come through unchanged, and
// reread alike.
func TestFilesOfPiecesComeThrough(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	upper := t.TempDir()
	const grain = 64 << 10
	for i, size := range []int64{0, 1, 1<<20 - 1, 1 << 20, 1<<20 + 1, 2<<20 - 1, 2 << 20, 3<<20 + 7, 64 << 20} {
		var all []written
		for range random.IntN(12) {
			if size > 0 {
				at := random.Int64N(size)
				all = append(all, written{at, strings.Repeat("ab", 1+random.IntN(50_000))[:min(size-at, 1000+random.Int64N(5000))/2]})
			}
		}
		sparseFile(t, filepath.Join(upper, fmt.Sprint("random", i)), size, all...)
	}
	// Many pieces: every sixteenth granule.
	var all []written
	for i := range int64(300) {
		all = append(all, written{i * 16 * grain, "x"})
	}
	sparseFile(t, filepath.Join(upper, "comb"), 300*16*grain-1, all...)
	dir, stream, read, applied := through(t, upper)
	if read.Size != applied.Size {
		t.Errorf("read %+v, applied %+v", read, applied)
	}
	if !bytes.Equal(stream, rereadHoles(t, dir)) {
		t.Error("what was unpacked reads as another stream")
	}
	entries, err := os.ReadDir(upper)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		want, got := read1(t, filepath.Join(upper, e.Name())), read1(t, filepath.Join(dir, e.Name()))
		if want != got {
			t.Errorf("%s: it is not what it was", e.Name())
		}
	}
}

// read1 returns the size of a file and the nonzero content of each block with its offset.
func read1(t *testing.T, name string) string {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	fmt.Fprintln(&out, fi.Size())
	zeros, buf := make([]byte, 64<<10), make([]byte, 64<<10)
	for at := int64(0); at < fi.Size(); {
		n, err := f.ReadAt(buf, at)
		if n == 0 {
			t.Fatal(err)
		}
		if bytes.Equal(buf[:n], zeros[:n]) { // most are, and to trim them takes long
			at += int64(n)
			continue
		}
		if trimmed := bytes.Trim(buf[:n], "\x00"); len(trimmed) > 0 {
			fmt.Fprintf(&out, "%d %x\n", at+int64(bytes.IndexByte(buf[:n], trimmed[0])), trimmed)
		}
		at += int64(n)
	}
	return out.String()
}

// The form means nothing unless it is asked for and comes from a snapshot: images have files
// unchanged.
func TestHolesAreOfSnapshotsOnly(t *testing.T) {
	upper := t.TempDir()
	sparseFile(t, filepath.Join(upper, "f"), 2<<20, written{0, "x"})
	var buf bytes.Buffer
	if _, err := layer.Diff(&buf, []layer.Overlay{{At: ".", Upper: open(t, upper)[0]}}, layer.DiffOptions{}); err != nil {
		t.Fatal(err)
	}
	if buf.Len() < 2<<20 {
		t.Errorf("a layer of an image has %d bytes", buf.Len())
	}
	dir := t.TempDir()
	stream := piecesEntry(t, "1099511627776,1", []int64{0, 3}, "abc")
	if _, err := layer.Apply(open(t, dir)[0], bytes.NewReader(stream), layer.Options{SingleID: true}); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(filepath.Join(dir, "f")); err != nil || fi.Size() != 16+3 {
		t.Errorf("a pulled layer's file: %v, %v", fi, err)
	}
}

func piecesEntry(t *testing.T, record string, numbers []int64, content string) []byte {
	t.Helper()
	var body []byte
	for _, n := range numbers {
		body = binary.LittleEndian.AppendUint64(body, uint64(n))
	}
	body = append(body, content...)
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	hdr := &tar.Header{Typeflag: tar.TypeReg, Name: "f", Mode: 0o644, Size: int64(len(body)), Format: tar.FormatPAX, PAXRecords: map[string]string{"SANDBOXD.pieces": record}}
	if err := w.WriteHeader(hdr); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(body); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func TestPiecesThatCannotBe(t *testing.T) {
	for name, test := range map[string]struct {
		record  string
		numbers []int64
	}{
		"nothing":           {"", []int64{1, 3}},
		"no number":         {"10,x", []int64{1, 3}},
		"no count":          {"10", []int64{1, 3}},
		"negative size":     {"-10,1", []int64{1, 3}},
		"negative count":    {"10,-1", []int64{1, 3}},
		"more than follows": {"10,2000", []int64{1, 3}},
		"far too many":      {"10,9223372036854775807", []int64{1, 3}},
		"negative offset":   {"10,1", []int64{-1, 3}},
		"empty piece":       {"10,2", []int64{1, 0, 2, 3}},
		"negative piece":    {"10,2", []int64{1, -3, 2, 6}},
		"out of order":      {"10,2", []int64{5, 2, 3, 1}},
		"overlapping":       {"10,2", []int64{2, 2, 3, 1}},
		"beyond the end":    {"10,1", []int64{8, 3}},
		"far beyond it":     {"10,1", []int64{1 << 62, 3}},
		"overflow":          {"9223372036854775807,1", []int64{9223372036854775806, 9223372036854775807}},
		"less follows":      {"10,1", []int64{1, 4}},
		"more follows":      {"10,1", []int64{1, 2}},
		"no piece":          {"10,0", nil},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := layer.Apply(open(t, t.TempDir())[0], bytes.NewReader(piecesEntry(t, test.record, test.numbers, "abc")), layer.Options{SingleID: true, FromDiff: true})
			if !errors.Is(err, layer.ErrInvalid) || !strings.Contains(err.Error(), "the pieces of the file") {
				t.Errorf("%v", err)
			}
		})
	}
	// The file system limits the size of a file: tmpfs accepts this one.
	probe := filepath.Join(t.TempDir(), "probe")
	if err := os.WriteFile(probe, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	tooLarge := os.Truncate(probe, math.MaxInt64)
	_, err := layer.Apply(open(t, t.TempDir())[0], bytes.NewReader(piecesEntry(t, "9223372036854775807,0", nil, "")), layer.Options{SingleID: true, FromDiff: true})
	if (err == nil) != (tooLarge == nil) {
		t.Errorf("a file of 8 EiB: %v, where the file system says %v", err, tooLarge)
	}
}

// Whatever an entry claims of its pieces, it is refused or makes a file of the claimed size, and no
// more bytes are written than it has.
func FuzzPieces(f *testing.F) {
	f.Add("1099511627776,2", int64(0), int64(3), int64(1<<30), int64(3), "abcdef")
	f.Add("10,1", int64(1), int64(3), int64(0), int64(0), "abc")
	f.Add("-1,2", int64(-1), int64(1<<62), int64(1<<62), int64(1<<62), "")
	f.Fuzz(func(t *testing.T, record string, at1, n1, at2, n2 int64, content string) {
		if strings.ContainsAny(record, "\x00") || len(content) > 1<<16 {
			return // tar has no such record, and more bytes show no more
		}
		dir := t.TempDir()
		result, err := layer.Apply(open(t, dir)[0], bytes.NewReader(piecesEntry(t, record, []int64{at1, n1, at2, n2}, content)), layer.Options{SingleID: true, FromDiff: true})
		if err != nil {
			return
		}
		fi, err := os.Stat(filepath.Join(dir, "f"))
		if err != nil {
			t.Fatal(err)
		}
		size, _, _ := strings.Cut(record, ",")
		if want, err := strconv.ParseInt(size, 10, 64); err != nil || fi.Size() != want || result.Size > int64(32+len(content)) {
			t.Errorf("%q is a file of %d bytes, %+v", record, fi.Size(), result)
		}
		if used := blocks(t, filepath.Join(dir, "f")); used > int64(len(content))+(1<<16) {
			t.Errorf("%d bytes of disk for %d of content", used, len(content))
		}
	})
}

// writerFunc is a function that is an [io.Writer].
type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// A program that writes zeros between the two readings of a file does not get a stream that is none
// of any tree.
func TestZerosThatAreWrittenMeanwhile(t *testing.T) {
	const size = 3<<20 + 777
	full := strings.Repeat("x", size)
	for name, test := range map[string]struct {
		before, after []written
		changed       bool
	}{
		"a piece":                    {[]written{{0, "x"}, {1 << 20, full[:100<<10]}}, []written{{1 << 20, strings.Repeat("\x00", 64<<10)}}, true},
		"the last piece":             {[]written{{0, "x"}, {size - 1, "x"}}, []written{{size - 1, "\x00"}}, true},
		"part of a piece":            {[]written{{0, "x"}, {1 << 20, full[:100<<10]}}, []written{{1 << 20, strings.Repeat("\x00", 64<<10-1)}}, false},
		"much of a file like others": {[]written{{0, full}}, []written{{64 << 10, strings.Repeat("\x00", 1<<20)}}, true},
		"less than that":             {[]written{{0, full}}, []written{{64 << 10, strings.Repeat("\x00", 1<<20-1)}}, false},
		"what was left out":          {[]written{{0, "x"}}, []written{{1 << 20, "x"}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			upper := t.TempDir()
			path := filepath.Join(upper, "changing")
			sparseFile(t, path, size, test.before...)
			var stream bytes.Buffer
			done := false
			_, err := layer.Diff(writerFunc(func(p []byte) (int, error) {
				if !done && bytes.Contains(p, []byte("changing")) { // its header: the pieces are known
					done = true
					sparseFileAgain(t, path, test.after...)
				}
				return stream.Write(p)
			}), []layer.Overlay{{At: ".", Upper: open(t, upper)[0]}}, layer.DiffOptions{Holes: true})
			if !done || errors.Is(err, layer.ErrChanged) != test.changed || !test.changed && err != nil {
				t.Fatalf("%v, want a change noticed: %t", err, test.changed)
			}
			if test.changed {
				return
			}
			dir := t.TempDir()
			if _, err := layer.Apply(open(t, dir)[0], bytes.NewReader(stream.Bytes()), layer.Options{SingleID: true, FromDiff: true}); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(stream.Bytes(), rereadHoles(t, dir)) {
				t.Error("what was unpacked reads as another stream")
			}
		})
	}
}

// sparseFileAgain writes to a file that is there.
func sparseFileAgain(t *testing.T, path string, all ...written) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, w := range all {
		if _, err := f.WriteAt([]byte(w.text), w.at); err != nil {
			t.Fatal(err)
		}
	}
}
