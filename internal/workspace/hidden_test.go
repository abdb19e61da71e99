package workspace

import (
	"archive/tar"
	"maps"
	"strings"
	"testing"
)

// What a sandbox did not see is neither shown nor changed, whatever the sandbox made or deleted
// around it.
func TestHiddenPathsAreLeftAlone(t *testing.T) {
	const secret = "hidden-of-the-host"
	files := map[string]string{
		".env": secret, "gone/.env": secret, "gone/a": "x", "gone/sub/b": "x", "gone/sub2/deep/key": secret, "gone/sub2/c": "x",
		"anew/.env": secret, "anew/a": "x", "anew/sub/key": secret, "anew/sub/b": "x", "file/.env": secret, "file/a": "x",
		"secrets/key": secret, "whole/a": "x", "plain": "p",
	}
	hidden := []string{".env", "gone/.env", "gone/sub2/deep", "anew/.env", "anew/sub/key", "file/.env", "secrets", "whole/absent", "absent", "gone.txt"}
	h := newHost(t, files)
	set, err := newArchive(t).dir(".").
		file(".env", "own").file(".wh.gone", "").dir("anew").file("anew/.wh..wh..opq", "").file("anew/new", "n").
		file("file", "was a directory").dir("secrets").file("secrets/.wh..wh..opq", "").file("secrets/key", "own").file("secrets/x", "own").
		put(tar.Header{Typeflag: tar.TypeLink, Name: "linked", Linkname: "secrets/x", Mode: 0o644}, "").
		file(".wh.whole", "").file("absent", "made").file(".wh.plain", "").file("gone.txt", "made").read()
	if err != nil {
		t.Fatal(err)
	}
	defer set.Close()
	d := h.open()
	p, err := set.Plan(d, d, h.since, hidden)
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]string)
	for _, i := range p.Items {
		got[i.Path] = string(i.Kind) + " " + i.Conflict
	}
	const unseen, within = "added the sandbox did not see what the host has there", "changed the host has files in the directory that the sandbox did not see"
	want := map[string]string{
		".env": unseen, "secrets/key": unseen, "secrets/x": unseen, "file": within,
		"gone/a": "deleted ", "gone/sub": "deleted ", "gone/sub2/c": "deleted ", "anew/a": "deleted ", "anew/sub/b": "deleted ",
		"anew/new": "added ", "whole": "deleted ", "plain": "deleted ", "absent": "added ", "gone.txt": "added ", "linked": "added ",
	}
	if !maps.Equal(got, want) {
		t.Errorf("items %q,\nwant  %q", got, want)
	}
	var patch strings.Builder
	if err := p.WritePatch(&patch, p.Items, nil); err != nil || strings.Contains(patch.String(), secret) {
		t.Errorf("the patch shows what is hidden: %v\n%s", err, patch.String())
	}
	left := applied(t, p, true)
	for name, kind := range want {
		if refused := strings.Contains(kind, "did not see"); refused != (left[name] != "") {
			t.Errorf("%s: left %q", name, left[name])
		}
	}
	for _, name := range []string{"gone/a", "gone/sub/b", "gone/sub2/c", "anew/a", "anew/sub/b", "whole/a", "plain"} {
		delete(files, name)
	}
	maps.Copy(files, map[string]string{"anew/new": "n", "absent": "made", "gone.txt": "made", "linked": "own", "gone/sub2/deep/key": secret})
	if got, want := show(t, h.dir), show(t, newHost(t, files).dir); got != want {
		t.Errorf("the directory is\n%s\nwant\n%s", got, want)
	}
	again, err := set.Plan(d, d, h.since, hidden)
	if err != nil || len(again.Items) != 4 {
		t.Errorf("a second plan has %d items, %v", len(again.Items), err)
	}
}
