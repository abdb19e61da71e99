package attack

import (
	"errors"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Corpus is every attack, in the order in which they are tried.
func Corpus() []Attack {
	var all []Attack
	for _, part := range [][]Attack{
		mounts(), namespaces(), initProcess(), kernelInterfaces(), aroundFilter(), hostControl(), hostPrivileges(), files(), programs(), sockets(), network(), terminals(),
		pools(),
	} {
		all = append(all, part...)
	}
	return all
}

// reached turns the kernel's answer to senseless arguments into success: the call was not refused.
func reached(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENOSYS) {
		return err
	}
	return nil
}

func path(name string) uintptr {
	p, _ := unix.BytePtrFromString(name)
	return uintptr(unsafe.Pointer(p))
}

// sorted makes the order one that maps do not choose.
func sorted(all []Attack) []Attack {
	slices.SortFunc(all, func(a, b Attack) int { return strings.Compare(a.Name, b.Name) })
	return all
}
