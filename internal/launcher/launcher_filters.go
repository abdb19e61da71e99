package launcher

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// filters keeps the seccomp filters of create and start requests. One is some 30 KB of JSON, which
// took a millisecond of each creation to decode, and the profiles of a host are few.
type filters struct {
	mu    sync.Mutex
	known []knownFilter // the last one was asked for last
}

type knownFilter struct {
	text   []byte
	filter *specs.LinuxSeccomp
}

// maxFilters bounds the kept filters: profiles that change again and again must not fill the
// memory.
const maxFilters = 16

// fill puts the filter that follows a request into its spec.
func (f *filters) fill(req *request) error {
	if len(req.filter) == 0 {
		return nil // an older daemon's spec has it
	}
	if req.Spec.Profile.Seccomp != nil {
		return errors.New("two seccomp filters")
	}
	var err error
	req.Spec.Profile.Seccomp, err = f.decode(req.filter)
	return err
}

// decode returns the filter that a text describes. Requests of the same text share one, and nothing
// changes it: the engine finds by its address what it has compiled it to. Texts are compared whole,
// because a filter that is mistaken for another one would be a hole.
func (f *filters) decode(text []byte) (*specs.LinuxSeccomp, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	i := slices.IndexFunc(f.known, func(k knownFilter) bool { return bytes.Equal(k.text, text) })
	if i >= 0 {
		k := f.known[i]
		f.known = append(slices.Delete(f.known, i, i+1), k)
		return k.filter, nil
	}
	var filter *specs.LinuxSeccomp
	if err := decode(text, &filter); err != nil {
		return nil, fmt.Errorf("read seccomp filter: %w", err)
	}
	if len(f.known) == maxFilters {
		f.known = slices.Delete(f.known, 0, 1)
	}
	f.known = append(f.known, knownFilter{text, filter})
	return filter, nil
}
