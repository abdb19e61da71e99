package layer_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"io"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/sandboxd/sandboxd/image/layer"
)

func compress(tb testing.TB, how string, b []byte) []byte {
	tb.Helper()
	var buf bytes.Buffer
	var w io.WriteCloser
	switch how {
	case "gzip":
		w = gzip.NewWriter(&buf)
	case "zstd":
		z, err := zstd.NewWriter(&buf)
		if err != nil {
			tb.Fatal(err)
		}
		w = z
	default:
		return b
	}
	if _, err := w.Write(b); err != nil {
		tb.Fatal(err)
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return buf.Bytes()
}

func TestCompression(t *testing.T) {
	plain := archive(t, file("a", "x"))
	gz, zs := compress(t, "gzip", plain), compress(t, "zstd", plain)
	half := len(plain) / 2
	header := gzipHeader(t, plain)
	// As stargz-snapshotter writes them: a gzip member for each entry, a table of contents as the last
	// entry, and a footer that is an empty member with an extra field.
	index := archive(t, file("stargz.index.json", `{"version":1}`))
	estargz := cat(compress(t, "gzip", plain[:half]), compress(t, "gzip", plain[half:len(plain)-1024]), compress(t, "gzip", index), gzipFooter(t))
	// As containers/storage writes them: zstd frames, and a table of contents and a footer in
	// skippable ones.
	chunked := cat(compress(t, "zstd", plain[:half]), compress(t, "zstd", plain[half:]), skippable(`{"version":1}`), skippable(strings.Repeat("f", 64)))
	const oci, docker = "application/vnd.oci.image.layer.v1.tar", "application/vnd.docker.image.rootfs.diff.tar"
	tests := []struct {
		name, mediaType string
		stream          []byte
		plain           []byte // uncompressed; nil for the archive of file "a"
		diffID          string
		err             string
	}{
		{name: "uncompressed", mediaType: oci, stream: plain},
		{name: "gzip", mediaType: oci + "+gzip", stream: gz},
		{name: "gzip by Docker", mediaType: docker + ".gzip", stream: gz},
		{name: "zstd", mediaType: oci + "+zstd", stream: zs},
		{name: "zstd after a skippable frame", mediaType: oci + "+zstd", stream: cat(skippable("abc"), zs)},
		{name: "gzip in two members", mediaType: oci + "+gzip", stream: append(compress(t, "gzip", plain[:half]), compress(t, "gzip", plain[half:])...)},
		{name: "gzip in many members, some of them empty", mediaType: oci + "+gzip", stream: cat(members(t, plain), gzipFooter(t))},
		{name: "gzip with name, comment and extra field", mediaType: oci + "+gzip", stream: header},
		{name: "estargz", mediaType: oci + "+gzip", stream: estargz, plain: cat(plain[:len(plain)-1024], index)},
		{name: "zstd in two frames", mediaType: oci + "+zstd", stream: cat(compress(t, "zstd", plain[:half]), compress(t, "zstd", plain[half:]))},
		{name: "zstd:chunked", mediaType: oci + "+zstd", stream: chunked},
		{name: "zstd with skippable frames everywhere", mediaType: oci + "+zstd", stream: cat(skippable(""), zs, skippable(""), skippable(strings.Repeat("x", 1<<20)))},
		{name: "zstd by Docker", mediaType: docker + ".zstd", stream: zs},
		{name: "a foreign layer", mediaType: "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", stream: gz},
		{name: "a layer that must not be distributed", mediaType: "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd", stream: zs},
		{name: "nothing", mediaType: oci, stream: nil, plain: []byte{}},
		{name: "nothing in gzip", mediaType: oci + "+gzip", stream: gzipFooter(t), plain: []byte{}},
		{name: "nothing in zstd", mediaType: oci + "+zstd", stream: skippable("x"), plain: []byte{}},
		{name: "zeros", mediaType: oci, stream: make([]byte, 10240), plain: make([]byte, 10240)},
		{name: "no media type", stream: zs},
		{name: "the promised diff id", stream: gz, diffID: digest(plain)},
		{name: "a name like gzip's magic number", mediaType: oci, stream: raw("\x1f\x8bname", tar.TypeReg, nil), plain: raw("\x1f\x8bname", tar.TypeReg, nil)},

		{name: "gzip that says zstd", mediaType: oci + "+zstd", stream: gz, err: "the layer is gzip"},
		{name: "plain that says gzip", mediaType: oci + "+gzip", stream: plain, err: "the layer is uncompressed"},
		{name: "an unknown media type", mediaType: "application/octet-stream", stream: plain, err: "not a layer"},
		{name: "bzip2", stream: []byte("BZh91AY&SY"), err: "bzip2 are not supported"},
		{name: "xz", stream: []byte("\xfd7zXZ\x00rest"), err: "xz are not supported"},
		{name: "lz4", stream: []byte("\x04\x22\x4d\x18rest"), err: "cut short"},
		{name: "gzip in gzip", mediaType: oci + "+gzip", stream: compress(t, "gzip", gz), err: "cut short"},
		{name: "an encrypted layer", mediaType: oci + "+gzip+encrypted", stream: gz, err: "not a layer"},
		{name: "gzip that says nothing", mediaType: oci, stream: gz, err: "the layer is gzip"},
		{name: "zeros after gzip", stream: cat(gz, make([]byte, 512)), err: "damaged"},
		{name: "garbage after zstd", stream: cat(zs, []byte("garbage garbage")), err: "damaged"},
		{name: "a gzip checksum that is wrong", stream: flip(gz, len(gz)-8), err: "damaged"},
		{name: "a gzip size that is wrong", stream: flip(gz, len(gz)-1), err: "damaged"},
		{name: "gzip of another method", stream: flip(gz, 2), err: "damaged"},
		{name: "a second gzip member that is damaged", stream: cat(gz, flip(gz, 2)), err: "damaged"},
		{name: "a gzip header and no more", stream: gz[:10], err: "cut short"},
		{name: "a zstd checksum that is wrong", stream: flip(zs, len(zs)-1), err: "damaged"},
		{name: "a zstd window of 256 MiB", stream: []byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 18 << 3, 0x01, 0, 0}, err: "damaged"},
		{name: "an unknown zstd dictionary", stream: []byte{0x28, 0xb5, 0x2f, 0xfd, 0x21, 7, 0, 0x01, 0, 0}, err: "damaged"},
		{name: "a zstd block of a reserved type", stream: []byte{0x28, 0xb5, 0x2f, 0xfd, 0x20, 0, 0x07, 0, 0}, err: "damaged"},
		{name: "a zstd frame that is larger than it says", stream: zstdLie(), err: "damaged"},
		{name: "a skippable frame that ends nowhere", stream: cat(zs, []byte{0x50, 0x2a, 0x4d, 0x18, 0xff, 0xff, 0xff, 0xff, 1, 2, 3}), err: "cut short"},
		{name: "a skippable frame without its length", stream: cat(zs, []byte{0x50, 0x2a, 0x4d, 0x18, 0xff}), err: "cut short"},
		{name: "truncated gzip", stream: gz[:len(gz)-9], err: "cut short"},
		{name: "truncated zstd", stream: zs[:len(zs)-9], err: "cut short"},
		{name: "broken gzip", stream: broken(gz), err: "damaged"},
		{name: "broken zstd", stream: broken(zs), err: "damaged"},
		{name: "garbage after gzip", stream: append(append([]byte(nil), gz...), "garbage garbage"...), err: "damaged"},
		{name: "another diff id", stream: gz, diffID: digest(gz), err: "configuration promises"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, root := plant(t)
			res, err := layer.Apply(root, bytes.NewReader(tt.stream), layer.Options{MediaType: tt.mediaType, DiffID: tt.diffID, SingleID: single()})
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) || !errors.Is(err, layer.ErrInvalid) {
					t.Fatalf("error %v, want an invalid layer with %q", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			want := tt.plain
			if want == nil {
				want = plain
				if _, err := root.Lstat("a"); err != nil {
					t.Error(err)
				}
			}
			if res.DiffID != digest(want) {
				t.Errorf("diff id %s, want %s", res.DiffID, digest(want))
			}
		})
	}
}

// Wherever a layer ends too early, the layer is at fault. An archive may end between two entries,
// where only the diff id shows it.
func TestLayersThatAreCutAnywhereAreInvalid(t *testing.T) {
	plain := archive(t,
		file("a", strings.Repeat("x", 700)), entry{typ: tar.TypeReg, name: strings.Repeat("d/", 120) + "x", format: tar.FormatPAX, xattrs: map[string]string{"user.a": "b"}},
		symlink("l", strings.Repeat("x", 150)), file("b", ""))
	for _, how := range []string{"none", "gzip", "zstd"} {
		stream := compress(t, how, plain)
		for n := 0; n < len(stream); n += 1 + len(stream)/24 {
			_, root := plant(t)
			_, err := layer.Apply(root, bytes.NewReader(stream[:n]), layer.Options{DiffID: digest(plain), SingleID: single()})
			if !errors.Is(err, layer.ErrInvalid) {
				t.Errorf("%s, the first %d of %d bytes: error %v", how, n, len(stream), err)
			}
		}
	}
}

// gzipHeader is gzip with all that its header may hold.
func gzipHeader(tb testing.TB, b []byte) []byte {
	tb.Helper()
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	w.Name, w.Comment, w.Extra, w.ModTime = "layer.tar", "a comment", bytes.Repeat([]byte("x"), 60000), epoch
	if _, err := w.Write(b); err != nil {
		tb.Fatal(err)
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return buf.Bytes()
}

// gzipFooter is an empty member with an extra field, as it ends an estargz layer.
func gzipFooter(tb testing.TB) []byte {
	tb.Helper()
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	w.Extra = append([]byte{'S', 'G', 22, 0}, "0000000000000100STARGZ"...)
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return buf.Bytes()
}

// members is gzip in one member for every hundred bytes, and an empty one after each.
func members(tb testing.TB, b []byte) []byte {
	tb.Helper()
	var out []byte
	for chunk := range slices.Chunk(b, 100) {
		out = append(append(out, compress(tb, "gzip", chunk)...), compress(tb, "gzip", nil)...)
	}
	return out
}

// skippable is a frame that zstd passes over.
func skippable(content string) []byte {
	frame := []byte{0x5e, 0x2a, 0x4d, 0x18}
	return append(binary.LittleEndian.AppendUint32(frame, uint32(len(content))), content...)
}

// zstdLie is a frame that announces one byte and holds four.
func zstdLie() []byte {
	// Single segment, content size 1; a last raw block of 4 bytes.
	return append([]byte{0x28, 0xb5, 0x2f, 0xfd, 0x20, 1, 4<<3 | 1, 0, 0}, "abcd"...)
}

// flip damages one byte.
func flip(b []byte, at int) []byte {
	b = append([]byte(nil), b...)
	b[at] ^= 0x55
	return b
}

func broken(b []byte) []byte {
	b = append([]byte(nil), b...)
	for i := len(b) / 2; i < len(b); i++ {
		b[i] ^= 0x55
	}
	return b
}

func TestDiffIDCoversWhatFollowsTheArchive(t *testing.T) {
	_, root := plant(t)
	stream := append(archive(t, file("a", "x")), bytes.Repeat([]byte{0}, 9<<10)...)
	stream = append(stream, "and a last word"...)
	res, err := layer.Apply(root, bytes.NewReader(stream), layer.Options{SingleID: single()})
	if err != nil {
		t.Fatal(err)
	}
	if res.DiffID != digest(stream) {
		t.Errorf("diff id %s, want %s", res.DiffID, digest(stream))
	}
}

func TestBombs(t *testing.T) {
	zeros := make([]byte, 8<<20)
	limits := layer.Limits{RatioFloor: 1 << 20, Ratio: 50, Bytes: 1 << 30}
	for _, how := range []string{"gzip", "zstd"} {
		for name, stream := range map[string][]byte{
			"in a file":         archive(t, file("zeros", string(zeros))),
			"behind the end":    append(archive(t, file("a", "")), zeros...),
			"in a skipped file": append(append(raw("dev", tar.TypeChar, nil), zeros...), make([]byte, 1024)...),
		} {
			t.Run(how+" "+name, func(t *testing.T) {
				_, root := plant(t)
				_, err := layer.Apply(root, bytes.NewReader(compress(t, how, stream)), layer.Options{SingleID: single(), Limits: limits})
				if err == nil || !strings.Contains(err.Error(), "more than 50 times") {
					t.Fatalf("error %v, want one about the ratio", err)
				}
			})
		}
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func TestReadErrorsAreNotTheLayersFault(t *testing.T) {
	gz := compress(t, "gzip", archive(t, file("a", strings.Repeat("x", 100))))
	for n := range len(gz) {
		_, root := plant(t)
		_, err := layer.Apply(root, io.MultiReader(bytes.NewReader(gz[:n]), failing{syscall.EIO}), layer.Options{SingleID: single()})
		if !errors.Is(err, syscall.EIO) || errors.Is(err, layer.ErrInvalid) {
			t.Fatalf("after %d bytes: error %v, want EIO and no blame", n, err)
		}
	}
}
