// Package memfd seals anonymous files in memory, which one process makes and others read.
package memfd

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// Seal lets nothing change a memfd any more: neither its content, nor its size, nor its seals. It
// must have been made with MFD_ALLOW_SEALING.
func Seal(f *os.File) error {
	const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	// EBUSY: on a busy host a page may be held for longer than the kernel waits itself
	// (memfd_wait_for_pins, some 150 ms).
	err := error(unix.EBUSY)
	for try := 0; try < 50 && errors.Is(err, unix.EBUSY); try++ {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals)
	}
	return err
}
