package runtimetest

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/runtime"
)

var _ runtime.Volumer = (*Engine)(nil)

// volumeUser returns the running sandbox that has a volume; empty if there is none. It needs mu.
func (e *Engine) volumeUser(id string) string {
	for _, b := range e.boxes {
		if b.running() && slices.ContainsFunc(b.spec.Volumes, func(m runtime.VolumeMount) bool { return m.ID == id }) {
			return b.spec.ID
		}
	}
	return ""
}

// RemoveVolume forgets the archive of a volume.
func (e *Engine) RemoveVolume(_ context.Context, id string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if user := e.volumeUser(id); user != "" {
		return fmt.Errorf("remove volume: sandbox %s has it: %w", user, runtime.ErrVolumeInUse)
	}
	delete(e.archives, id)
	return nil
}

// MeasureVolume returns the size of the archive of a volume.
func (e *Engine) MeasureVolume(_ context.Context, id string) (runtime.VolumeUsage, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.unavailable {
		return runtime.VolumeUsage{}, runtime.ErrUnavailable
	}
	return runtime.VolumeUsage{Bytes: int64(len(e.archives[id]))}, nil
}

// WriteVolume writes the archive that a volume was filled with.
func (e *Engine) WriteVolume(_ context.Context, id string, w io.Writer) (runtime.DiffResult, error) {
	e.mu.Lock()
	data := e.archives[id]
	e.mu.Unlock()
	n, err := io.WriteString(w, data)
	return runtime.DiffResult{Size: int64(n)}, err
}

// FillVolume keeps an archive, which it does not unpack.
func (e *Engine) FillVolume(ctx context.Context, id string, r *os.File, limit runtime.VolumeUsage) (runtime.DiffResult, error) {
	var data strings.Builder
	n, err := io.Copy(&data, r)
	if err != nil {
		return runtime.DiffResult{}, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	switch user := e.volumeUser(id); {
	case ctx.Err() != nil:
		return runtime.DiffResult{}, context.Cause(ctx)
	case user != "":
		return runtime.DiffResult{}, fmt.Errorf("fill volume: sandbox %s has it: %w", user, runtime.ErrVolumeInUse)
	case e.archives[id] != "":
		return runtime.DiffResult{}, fmt.Errorf("fill volume: %w", runtime.ErrVolumeNotEmpty)
	case limit.Bytes > 0 && n > limit.Bytes:
		return runtime.DiffResult{}, fmt.Errorf("fill volume: %d bytes are more than its %d", n, limit.Bytes)
	}
	if e.archives == nil {
		e.archives = make(map[string]string)
	}
	e.archives[id] = data.String()
	return runtime.DiffResult{Size: n, Entries: 1}, nil
}
