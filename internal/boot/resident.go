package boot

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// mapping is a part of this program's file in memory.
type mapping struct{ from, to uintptr }

// programMappings returns the parts of the program's file that are mapped and cannot be written.
func programMappings() ([]mapping, error) {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return nil, fmt.Errorf("find the program's mappings: %w", err)
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return nil, fmt.Errorf("find the program's mappings: %w", err)
	}
	var found []mapping
	for line := range strings.Lines(string(maps)) {
		var m mapping
		var rights string
		if _, err := fmt.Sscanf(line, "%x-%x %s", &m.from, &m.to, &rights); err != nil {
			return nil, fmt.Errorf("read the program's mappings: %w", err)
		}
		if len(rights) == 4 && rights[1] == '-' && strings.HasSuffix(strings.TrimSpace(line), " "+program) {
			found = append(found, m)
		}
	}
	return found, nil
}

// releaseStart gives back the pages of the program that its start has read. An idle daemon does not
// need most of them again. The kernel keeps the file, so that a page that is needed is mapped anew.
// It is mapped alone: where the file is in huge pages, each would bring 2 MiB.
func releaseStart(program []mapping) error {
	for _, m := range program {
		// Kernels without huge pages do not know the advice.
		if err := advise(m, unix.MADV_NOHUGEPAGE); err != nil && !errors.Is(err, unix.EINVAL) {
			return err
		}
		if err := advise(m, unix.MADV_DONTNEED); err != nil {
			return err
		}
	}
	return nil
}

func advise(m mapping, advice uintptr) error {
	if _, _, errno := unix.Syscall(unix.SYS_MADVISE, m.from, m.to-m.from, advice); errno != 0 {
		return fmt.Errorf("release the pages of the start: %w", errno)
	}
	return nil
}
