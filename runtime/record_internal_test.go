package runtime

import (
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/api"
)

// Records have the sockets of published ports relative to the runtime directory, which may move.
// Records that have absolute paths are read too.
func TestSocketsMoveWithTheRuntimeDirectory(t *testing.T) {
	dir := t.TempDir()
	r, err := openRecords(dir, "/run/old")
	if err != nil {
		t.Fatal(err)
	}
	rec := &Record{Sandbox: api.Sandbox{ID: "a", Ports: []api.PortMapping{{Port: 80, Socket: "/run/old/ports/web"}, {Port: 81, Address: "127.0.0.1"}}}}
	if err := r.put(rec); err != nil {
		t.Fatal(err)
	}
	if at := rec.Ports[0].Socket; at != "/run/old/ports/web" {
		t.Errorf("the record in memory has %s", at)
	}
	err = r.db.View(func(tx *bolt.Tx) error {
		if v := string(tx.Bucket(bucketSandboxes).Get([]byte("a"))); !strings.Contains(v, `"socket":"ports/web"`) {
			t.Errorf("on disk: %s", v)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	const absolute = `{"id":"b","ports":[{"port":80,"socket":"/run/older/ports/web"}]}`
	err = r.db.Update(func(tx *bolt.Tx) error { return tx.Bucket(bucketSandboxes).Put([]byte("b"), []byte(absolute)) })
	if err != nil {
		t.Fatal(err)
	}
	if err := r.close(); err != nil {
		t.Fatal(err)
	}
	if r, err = openRecords(dir, "/run/new"); err != nil {
		t.Fatal(err)
	}
	defer r.close()
	all, err := r.all()
	if err != nil || len(all) != 2 {
		t.Fatalf("%d records, %v", len(all), err)
	}
	for _, rec := range all {
		if at := rec.Ports[0].Socket; at != "/run/new/ports/web" {
			t.Errorf("sandbox %s: %s", rec.ID, at)
		}
	}
	if at := all[0].Ports[1]; at.Socket != "" || at.Address != "127.0.0.1" {
		t.Errorf("a port without a socket: %+v", at)
	}
}
