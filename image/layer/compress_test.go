package layer

import (
	"bytes"
	stdgzip "compress/gzip"
	"crypto/sha256"
	"io"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"
)

// Whatever is in a layer that we make, it can be read again under the limits for those of others.
func TestCompressorKeepsToTheRatio(t *testing.T) {
	limits := Limits{RatioFloor: 1 << 20, Ratio: 50, Bytes: 1 << 30}.WithDefaults()
	random := make([]byte, 1<<20+17)
	chacha := rand.NewChaCha8([32]byte{})
	_, _ = chacha.Read(random)
	long := make([]byte, 20<<20) // more than is read ahead, fifty times
	zeros := long[:8<<20]
	for name, tt := range map[string]struct {
		parts [][]byte
		same  bool // as gzip without us
	}{
		"nothing":         {nil, true},
		"few zeros":       {[][]byte{zeros[:1<<20]}, true},
		"random":          {[][]byte{random}, true},
		"zeros":           {[][]byte{zeros}, false},
		"random at first": {[][]byte{random, zeros}, true}, // enough to let the zeros pass
		"random at last":  {[][]byte{long, random}, false},
		"by turns":        {[][]byte{random[:9], zeros[:3<<20], random[:1<<16], zeros[:7<<20], zeros}, false},
	} {
		t.Run(name, func(t *testing.T) {
			var blob, again, plain bytes.Buffer
			c, ordinary := newCompressor(&blob, limits), gzip.NewWriter(&plain)
			whole := bytes.Join(tt.parts, nil)
			for _, p := range tt.parts {
				if n, err := c.Write(p); n != len(p) || err != nil {
					t.Fatalf("wrote %d of %d, %v", n, len(p), err)
				}
				if _, err := ordinary.Write(p); err != nil {
					t.Fatal(err)
				}
			}
			twin := newCompressor(&again, limits)
			if _, err := io.Copy(twin, io.MultiReader(bytes.NewReader(whole))); err != nil {
				t.Fatal(err)
			}
			for _, w := range []io.Closer{c, twin, ordinary} {
				if err := w.Close(); err != nil {
					t.Fatal(err)
				}
			}
			if !bytes.Equal(blob.Bytes(), again.Bytes()) {
				t.Error("the same stream in other pieces gives other bytes")
			}
			if same := bytes.Equal(blob.Bytes(), plain.Bytes()); same != tt.same {
				t.Errorf("the same as gzip alone: %v, want %v", same, tt.same)
			}
			read := func(data []byte) ([32]byte, error) {
				hash := sha256.New()
				u, err := Uncompress(bytes.NewReader(data), "x+gzip", limits)
				if err != nil {
					return [32]byte{}, err
				}
				defer u.Close()
				_, err = io.Copy(hash, u)
				return [32]byte(hash.Sum(nil)), err
			}
			if sum, err := read(blob.Bytes()); err != nil || sum != sha256.Sum256(whole) {
				t.Errorf("read again: %v", err)
			}
			if _, err := read(plain.Bytes()); !tt.same && (err == nil || !strings.Contains(err.Error(), "50 times")) {
				t.Errorf("control: gzip without us: %v", err)
			}
			std, err := stdgzip.NewReader(&blob)
			if err != nil {
				t.Fatal(err)
			}
			std.Multistream(false) // many read no more
			hash := sha256.New()
			if _, err := io.Copy(hash, std); err != nil || [32]byte(hash.Sum(nil)) != sha256.Sum256(whole) {
				t.Errorf("read by others: %v", err)
			}
			if most := int64(len(whole))/limits.Ratio + 2*limits.RatioFloor/8/limits.Ratio + 1<<16; !tt.same && int64(blob.Len()) > most+int64(len(random)) {
				t.Errorf("%d bytes for %d", blob.Len(), len(whole))
			}
		})
	}
}

// With the product's limits, a sixteenth of their floor, and beyond that and the next eighth that
// they allow.
func TestZerosComeBack(t *testing.T) {
	var blob bytes.Buffer
	if its := NewCompressor(&blob).limits; its != DefaultLimits() {
		t.Errorf("the compressor's limits are %+v", its)
	}
	limits := DefaultLimits()
	limits.RatioFloor /= 16
	c := newCompressor(&blob, limits)
	const size = 300 << 20 / 16
	zeros := make([]byte, size/300)
	for range 300 {
		if _, err := c.Write(zeros); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	u, err := Uncompress(bytes.NewReader(blob.Bytes()), "", limits)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	if n, err := io.Copy(io.Discard, u); n != size || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
	if blob.Len() > size/100 {
		t.Errorf("the blob has %d bytes", blob.Len())
	}
}
