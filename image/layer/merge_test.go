package layer

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
)

func TestMergeChanges(t *testing.T) {
	// "A d /a" is a directory added; f is a file, and its size is that of its level.
	list := func(size int64, text string) (out []api.Change) {
		kinds := map[string]api.ChangeKind{"A": api.Added, "C": api.Changed, "D": api.Deleted}
		types := map[string]string{"d": "directory", "f": "file"}
		for line := range strings.SplitSeq(text, ",") {
			if w := strings.Fields(line); len(w) == 3 {
				c := api.Change{Kind: kinds[w[0]], Type: types[w[1]], Path: w[2]}
				if w[1] == "f" {
					c.Size = size
				}
				out = append(out, c)
			}
		}
		return out
	}
	text := func(changes []api.Change) string {
		var lines []string
		for _, c := range changes {
			lines = append(lines, strings.ToUpper(string(c.Kind[:1]))+" "+c.Type[:1]+" "+c.Path)
		}
		return strings.Join(lines, ", ")
	}
	for name, test := range map[string]struct {
		levels []string
		want   string
	}{
		"nothing":                     {nil, ""},
		"one level":                   {[]string{"C d /b, A f /a"}, "A f /a, C d /b"},
		"side by side":                {[]string{"A f /a", "D f /b", "C f /c"}, "A f /a, D f /b, C f /c"},
		"added, then changed":         {[]string{"A f /a", "C f /a"}, "A f /a"},
		"changed twice":               {[]string{"C f /a", "C f /a"}, "C f /a"},
		"added, then deleted":         {[]string{"A f /a", "D f /a"}, ""},
		"changed, then deleted":       {[]string{"C f /a", "D f /a"}, "D f /a"},
		"deleted, then added":         {[]string{"D f /a", "A f /a"}, "C f /a"},
		"deleted, added, deleted":     {[]string{"D f /a", "A f /a", "D f /a"}, "D f /a"},
		"added, deleted, added":       {[]string{"A f /a", "D f /a", "A f /a"}, "A f /a"},
		"deleted with what is in it":  {[]string{"C d /d, A f /d/x, C f /d/y, D f /d/z", "D d /d"}, "D d /d"},
		"added with what is in it":    {[]string{"A d /d, A f /d/x", "D d /d"}, ""},
		"not what begins alike":       {[]string{"A f /dd, A f /d/x", "D d /d"}, "D d /d, A f /dd"},
		"a directory made anew":       {[]string{"D d /d", "A d /d, A f /d/y"}, "C d /d, A f /d/y"},
		"a directory becomes a file":  {[]string{"C d /d, A f /d/x", "C f /d"}, "C f /d"},
		"a file becomes a directory":  {[]string{"C f /d", "C d /d, A f /d/x"}, "C d /d, A f /d/x"},
		"deep below":                  {[]string{"A d /a, A d /a/b, A f /a/b/c", "D d /a/b"}, "A d /a"},
		"emptied and filled anew":     {[]string{"C d /d, A f /d/x", "C d /d, D f /d/x, A f /d/n"}, "C d /d, A f /d/n"},
		"the root":                    {[]string{"C d /", "C d /, A f /x"}, "C d /, A f /x"},
		"added to one that was added": {[]string{"A d /d", "C d /d, A f /d/x", "D f /d/x"}, "A d /d"},
	} {
		t.Run(name, func(t *testing.T) {
			var levels [][]api.Change
			for i, l := range test.levels {
				levels = append(levels, list(int64(i), l))
			}
			if diff := cmp.Diff(test.want, text(MergeChanges(levels...))); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	got := MergeChanges(list(1, "A f /a"), list(2, "C f /a"))
	if len(got) != 1 || got[0].Size != 2 {
		t.Errorf("the size is not the last one: %+v", got)
	}
}
