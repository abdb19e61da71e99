package snapshot_test

import (
	"archive/tar"
	"bytes"
	"testing"

	"github.com/sandboxd/sandboxd/image/snapshot"
)

// A file gives no sandbox a network, whatever it says.
func TestFileHasNoNetwork(t *testing.T) {
	const header = `{"version": 2, "snapshot": {"id": "a", "cwd": "/", "tenant": "5", "network": {"mode": "full"}}}`
	var file bytes.Buffer
	w := tar.NewWriter(&file)
	if err := w.WriteHeader(&tar.Header{Name: "snapshot.json", Typeflag: tar.TypeReg, Size: int64(len(header)), Mode: 0o644}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte(header)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := snapshot.Open(&file)
	if err != nil {
		t.Fatal(err)
	}
	if n := f.Snapshot.Network; n.Mode != "" || f.Snapshot.Tenant != "" {
		t.Errorf("network %+v, tenant %q; want none", n, f.Snapshot.Tenant)
	}
}
