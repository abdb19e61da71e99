package runtime_test

import (
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

func TestCheckHidden(t *testing.T) {
	long := strings.Repeat("x", 255)
	if err := runtime.CheckHidden([]string{".env", "a/b/..c", "a b/\n\xff", long + "/" + long}); err != nil {
		t.Error(err)
	}
	for _, p := range []string{"", ".", "..", "/", "/a", "a/", "a//b", "./a", "a/.", "../a", "a/../b", "a/..", "a\x00b", long + "x", strings.Repeat("a/", 2048) + "a"} {
		if err := runtime.CheckHidden([]string{"fine", p}); err == nil {
			t.Errorf("%.40q passes", p)
		}
	}
	if err := runtime.CheckHidden(make([]string, api.MaxHidden+1)); err == nil || !strings.Contains(err.Error(), "at most") {
		t.Errorf("too many: %v", err)
	}
	many := make([]string, api.MaxHiddenBytes/len(long)+1)
	for i := range many {
		many[i] = long
	}
	if err := runtime.CheckHidden(many); err == nil || !strings.Contains(err.Error(), "bytes together") {
		t.Errorf("too long together: %v", err)
	}
}
