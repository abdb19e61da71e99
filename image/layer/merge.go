package layer

import (
	"cmp"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/api"
)

// MergeChanges merges the changes of several levels, each of which lies on those before it. Lists
// have the order of [Changes]; the result is sorted by path.
//
// A directory that one level deleted and a later one made anew is changed. Its content counts as
// added, even if the first one had such a name: no list has the content of a deleted directory.
func MergeChanges(levels ...[]api.Change) []api.Change {
	type change struct {
		api.Change
		was bool // before the first level
	}
	state := make(map[string]change)
	// hidden forgets everything below a path, because it went with the directory.
	hidden := func(paths []string) {
		if len(paths) == 0 {
			return
		}
		gone := make(map[string]bool, len(paths))
		for _, p := range paths {
			gone[p] = true
		}
		for path := range state {
			for dir := path; len(dir) > 1; {
				dir = dir[:strings.LastIndexByte(dir, '/')]
				if gone[dir] {
					delete(state, path)
					break
				}
			}
		}
	}
	for _, level := range levels {
		// First the entries below them: the level may have put something there itself.
		var replaced []string
		for _, c := range level {
			if c.Kind == api.Deleted || c.Type != "directory" {
				replaced = append(replaced, c.Path)
			}
		}
		hidden(replaced)
		for _, c := range level {
			before, known := state[c.Path]
			was := c.Kind != api.Added
			if known {
				was = before.was
			}
			switch {
			case c.Kind == api.Deleted && !was:
				delete(state, c.Path)
				continue
			case c.Kind == api.Deleted:
			case was:
				c.Kind = api.Changed
			default:
				c.Kind = api.Added
			}
			state[c.Path] = change{c, was}
		}
	}
	merged := make([]api.Change, 0, len(state))
	for _, c := range state {
		merged = append(merged, c.Change)
	}
	slices.SortFunc(merged, func(a, b api.Change) int { return cmp.Compare(a.Path, b.Path) })
	return merged
}
