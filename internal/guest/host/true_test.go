package host

import (
	"encoding/binary"
	"os"
	"path/filepath"
	goruntime "runtime"
	"testing"
)

// staticTrue writes a static program that exits 0: a tiny ELF file, so that no compiler is needed
// and no dynamic loader is measured.
func staticTrue(tb testing.TB) string {
	tb.Helper()
	var code []byte
	var machine uint16
	switch goruntime.GOARCH {
	case "amd64":
		machine = 62
		code = []byte{0x31, 0xff, 0xb8, 231, 0, 0, 0, 0x0f, 0x05} // exit_group(0)
	case "arm64":
		machine = 183
		code = []byte{0x00, 0x00, 0x80, 0xd2, 0xc8, 0x0b, 0x80, 0xd2, 0x01, 0x00, 0x00, 0xd4}
	default:
		tb.Skip("no static program for " + goruntime.GOARCH)
	}
	const base, header = 0x400000, 64 + 56
	le := binary.LittleEndian
	b := append([]byte("\x7fELF\x02\x01\x01"), make([]byte, 9)...)
	b = le.AppendUint16(b, 2) // ET_EXEC
	b = le.AppendUint16(b, machine)
	b = le.AppendUint32(b, 1)
	b = le.AppendUint64(b, base+header) // entry
	b = le.AppendUint64(b, 64)          // program headers
	b = le.AppendUint64(b, 0)
	b = le.AppendUint32(b, 0)
	for _, v := range []uint16{64, 56, 1, 0, 0, 0} {
		b = le.AppendUint16(b, v)
	}
	b = le.AppendUint32(b, 1) // PT_LOAD
	b = le.AppendUint32(b, 5) // r-x
	for _, v := range []uint64{0, base, base, uint64(header + len(code)), uint64(header + len(code)), 0x1000} {
		b = le.AppendUint64(b, v)
	}
	path := filepath.Join(tb.TempDir(), "true")
	if err := os.WriteFile(path, append(b, code...), 0o755); err != nil {
		tb.Fatal(err)
	}
	return path
}
