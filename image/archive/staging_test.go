package archive

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/image/errdefs"
	"github.com/sandboxd/sandboxd/image/layer"
	"github.com/sandboxd/sandboxd/image/store"
)

// staging returns a staging area with limits in a new store.
func staging(t *testing.T, limit int64) *Staging {
	t.Helper()
	st, err := store.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	limits := layer.DefaultLimits()
	limits.Bytes = limit
	return NewStaging(st, limits, func(context.Context, string) error { return nil })
}

// A layer that cannot be stored is reported as such, not by the resulting error of its writer.
func TestPackThatCannotBeStored(t *testing.T) {
	a := staging(t, 1000)
	_, err := a.Pack(t.Context(), func(ctx context.Context, w io.Writer) error {
		for ctx.Err() == nil {
			if _, err := w.Write(noise()); err != nil {
				<-ctx.Done()
			}
		}
		return fmt.Errorf("read the sandbox: %w", ctx.Err())
	})
	if !errors.Is(err, layer.ExceededBytes) || errors.Is(err, context.Canceled) {
		t.Errorf("%v, want the store's error", err)
	}
	own := errors.New("own")
	if _, err := a.Pack(t.Context(), func(context.Context, io.Writer) error { return own }); err != own { //nolint:errorlint // unchanged
		t.Errorf("%v, want the writer's error", err)
	}
}

func TestRootFileSystemThatIsTooLarge(t *testing.T) {
	a := staging(t, 1000)
	_, err := ImportRootfs(t.Context(), a, bytes.NewReader(make([]byte, 1001)), v1.Platform{}, api.ImageConfig{})
	if !errors.Is(err, errdefs.ErrInvalid) || !strings.Contains(err.Error(), "more than 1000 bytes") {
		t.Errorf("error %v", err)
	}
}

func TestDocumentsThatBecomeTooLarge(t *testing.T) {
	a := staging(t, 1000)
	if _, err := a.AddJSON(t.Context(), v1.Manifest{Annotations: map[string]string{"a": strings.Repeat("<", store.MaxDocument/2)}}); !errors.Is(err, errdefs.ErrInvalid) {
		t.Errorf("%v", err) // "<" is six bytes
	}
}

// noise returns incompressible bytes.
func noise() []byte {
	b := make([]byte, 64<<10)
	_, _ = rand.Read(b) // never fails
	return b
}
