package service

import (
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/image/build"
)

// Beyond the limit the tenant with the most loses the cache that it has used longest ago, and a
// smaller one nothing.
func TestCachesOfTheLargestTenantMakeRoom(t *testing.T) {
	c := &buildCaches{dir: t.TempDir()}
	keep := func(tenant, id string, size int, age time.Duration) {
		t.Helper()
		l, err := c.lease(t.Context(), tenant, id, build.ShareShared)
		if err != nil {
			t.Fatal(err)
		}
		defer l.release()
		err = l.save(func(w io.Writer) error { _, err := io.WriteString(w, strings.Repeat("x", size)); return err })
		at := time.Now().Add(-age)
		if err == nil {
			err = os.Chtimes(l.path, at, at)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	keep("", "old", 40, 3*time.Hour)
	keep("", "new", 40, time.Hour)
	keep("small", "old", 30, 9*time.Hour)
	for _, step := range []struct {
		most int64
		want []string
	}{
		{200, []string{"/old", "/new", "small/old"}}, {109, []string{"/new", "small/old"}}, {69, []string{"small/old"}}, {29, nil},
	} {
		if err := c.limit(step.most); err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, name := range []string{"/old", "/new", "small/old"} {
			tenant, id, _ := strings.Cut(name, "/")
			if _, err := os.Stat(c.path(tenant, id)); err == nil {
				got = append(got, name)
			}
		}
		if diff := cmp.Diff(step.want, got); diff != "" {
			t.Errorf("at most %d bytes (-want +got):\n%s", step.most, diff)
		}
	}
}

// A locked cache is had by one at a time; of private ones the second begins empty and is not kept.
func TestCachesAreLeased(t *testing.T) {
	c := &buildCaches{dir: t.TempDir()}
	first, err := c.lease(t.Context(), "", "id", build.ShareLocked)
	if err != nil {
		t.Fatal(err)
	}
	private, err := c.lease(t.Context(), "", "id", build.SharePrivate)
	if err != nil || private.mine || !private.empty {
		t.Fatalf("%+v, %v", private, err)
	}
	private.release()
	got := make(chan *cacheLease)
	go func() {
		l, _ := c.lease(t.Context(), "", "id", build.ShareLocked)
		got <- l
	}()
	select {
	case <-got:
		t.Error("two have it")
	default:
	}
	first.release()
	first.release() // once more is no harm
	(<-got).release()
	if private, err = c.lease(t.Context(), "", "id", build.SharePrivate); err != nil || !private.mine {
		t.Errorf("%+v, %v", private, err)
	}
	private.release()
	if len(c.inUse) != 0 {
		t.Errorf("%d uses are left", len(c.inUse))
	}
}
