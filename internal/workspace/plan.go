package workspace

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api"
)

// Item is one change that the directory needs to match the sandbox's view.
type Item struct {
	Path string // relative; any bytes but NUL
	Kind api.ChangeKind
	Type string // of what the sandbox has; of what is deleted
	Size int64  // bytes of a file's content
	Mode string // permissions, as in chmod; empty for a deletion and a link
	// WasMode is the Mode of what the host has, if that is a file or directory.
	WasMode string
	// Protected items are applied only if that is asked for: see [Protected].
	Protected bool
	// Conflict says what has happened to the file on the host since the sandbox began. Refused says
	// why the change is never applied. At most one of the two is set; the item is then not applied.
	Conflict, Refused string
	// Note is something that is left out.
	Note string

	e   *entry // nil for what an opaque directory hides
	was state
}

// Plan is what it takes to bring a set of changes into a directory.
type Plan struct {
	Items []*Item

	set   *Set
	to    *Dir
	base  *Dir // the workspace's directory; equal to if that is changed itself
	since time.Time
	// hidden are paths that the sandbox did not see.
	hidden hiddenPaths
	// gone are directories of the set that stand where the host has none: nothing is below them
	// yet.
	gone         map[string]bool
	repositories map[string]bool // see inRepository
	exchanged    func()          // runs after an exchange, for tests
	// like are the files of the host that are as in the set; others of the set may be further names
	// of them.
	like map[string]state
}

// Plan compares the set with the directory to. Base is the workspace's own directory, and since
// the time before which the sandbox saw none of its files: a file of base with a later change of
// status is in conflict, and a file of another directory unless it is like that of base. What to
// has at the hidden paths, which the sandbox did not see at all, is neither changed nor shown.
//
// Files that are like the sandbox's are no item, so a second plan after [Plan.Apply] has only what
// was not applied.
func (s *Set) Plan(to, base *Dir, since time.Time, hidden []string) (*Plan, error) {
	p := &Plan{set: s, to: to, base: base, since: since, hidden: newHiddenPaths(hidden), gone: make(map[string]bool), like: make(map[string]state), repositories: make(map[string]bool)}
	covered := make(map[string]bool) // directories that an opaque one at or above them covers
	for _, e := range s.entries {
		if e.kind == directory && (e.opaque || covered[path.Dir(e.path)]) {
			covered[e.path] = true
		}
		if p.isHidden(e.path) {
			if err := p.atHidden(e); err != nil {
				return nil, err
			}
			continue
		}
		if err := p.entry(e, covered[e.path]); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (p *Plan) entry(e *entry, covers bool) error {
	item := &Item{Path: e.path, Type: e.kind.String(), Size: e.size, Protected: p.protected(e.path), e: e}
	if e.bits {
		item.Note = "its set-id bits are left out"
	}
	if !p.gone[path.Dir(e.path)] {
		var err error
		if item.was, err = p.to.stat(e.path); err != nil {
			item.Kind, item.Refused = api.Changed, "it cannot be reached without following a link or leaving the file system: "+reason(err)
			p.Items = append(p.Items, item)
			return nil
		}
	}
	was := &item.was
	if e.kind == file || e.kind == directory {
		// What others of the host could not write, they cannot afterwards.
		const others = 0o022
		allowed := e.mode &^ others
		if was.kind == e.kind {
			allowed |= e.mode & was.mode
			item.WasMode = fmt.Sprintf("%04o", was.mode)
		}
		if allowed != e.mode {
			e.mode, item.Note = allowed, "that others may write it is left out"
		}
		item.Mode = fmt.Sprintf("%04o", e.mode)
	}
	if e.kind == directory && was.kind != directory {
		p.gone[e.path] = true
	}
	equal, err := p.equal(e, was)
	if err != nil {
		return err
	}
	if equal && e.kind != none && e.kind != directory {
		p.like[e.path] = *was
	}
	if !equal && e.kind == none {
		return p.deleted(e.path, e, was)
	}
	if !equal {
		item.Kind = api.Changed
		if was.kind == none {
			item.Kind = api.Added
		}
		p.judge(item)
		p.Items = append(p.Items, item)
	} else if e.kind == special {
		return nil
	}
	if covers && was.kind == directory {
		return p.hides(e.path)
	}
	return nil
}

// equal reports whether the host has what the entry says.
func (p *Plan) equal(e *entry, was *state) (bool, error) {
	if e.kind != was.kind || e.kind == special {
		return false, nil
	}
	switch e.kind {
	case none, special:
	case directory:
		return e.mode == was.mode, nil
	case link:
		target, err := p.to.readlink(e.path)
		return err == nil && target == e.target, nil
	case file:
		if e.mode != was.mode || e.size != was.size {
			return false, nil
		}
		if e.same != "" && !p.isHidden(e.same) {
			if first, err := p.to.stat(e.same); err != nil || first.ino != was.ino {
				return false, nil
			}
		}
		f, err := p.to.read(e.path)
		if err != nil {
			return false, nil
		}
		defer f.Close() // only read
		return equal(f, p.set.content(e))
	}
	return true, nil
}

// hides adds what the host has in a directory that the sandbox emptied, and the set does not.
func (p *Plan) hides(dir string) error {
	names, err := p.to.list(dir)
	if err != nil {
		return err
	}
	for _, base := range names {
		name := dir + "/" + base
		if p.set.byPath[name] != nil || p.hidden.set[name] {
			continue
		}
		was, err := p.to.stat(name)
		if err == nil {
			err = p.deleted(name, nil, &was)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// judge fills in why an item must not be applied.
func (p *Plan) judge(item *Item) {
	e, was := item.e, &item.was
	switch {
	case e != nil && e.kind == special:
		item.Refused = "special files are left out"
	case e != nil && e.kind == link && leadsOut(e.path, e.target):
		item.Refused = "the link leads out of the directory, to " + Quote(e.target)
	case was.kind == special:
		item.Refused = "the host has a special file there"
	case was.kind == directory && (e == nil || e.kind != directory) && p.keeps(item.Path):
		item.Conflict = "the host has files in the directory that the sandbox did not see"
	case was.kind == directory && e != nil && e.kind == directory:
		// Of a directory only the mode is at stake, and its status changes with every file in it.
	case was.kind != none:
		if err := p.unchanged(item.Path, item.Path, was); err != nil {
			item.Conflict = reason(err)
		}
	}
	if was.kind == directory && !item.Protected && (e == nil || e.kind != directory) && p.protects(item.Path) {
		item.Protected = true // with what is in it
	}
}

// unchanged reports whether the tree of a name is what the sandbox saw. At is where the tree
// is now.
func (p *Plan) unchanged(name, at string, st *state) error {
	if st.kind == directory {
		names, err := p.to.list(at)
		if err != nil {
			return err
		}
		for _, base := range names {
			below, err := p.to.stat(at + "/" + base)
			if err != nil {
				return err
			}
			if err := p.unchanged(name+"/"+base, at+"/"+base, &below); err != nil {
				return err
			}
		}
		return nil
	}
	if p.to == p.base {
		if !st.ctime.Before(p.since) {
			return fmt.Errorf("%s has %w", Quote(name), errChanged)
		}
		return nil
	}
	base, err := p.base.stat(name)
	if err != nil {
		return err
	}
	differs := fmt.Errorf("%s differs from that of the workspace", Quote(name))
	switch {
	case base.kind != st.kind || st.kind == special:
		return differs
	case !base.ctime.Before(p.since):
		return fmt.Errorf("%s of the workspace has %w", Quote(name), errChanged)
	case st.kind == link:
		a, err := p.base.readlink(name)
		b, berr := p.to.readlink(at)
		if err := errors.Join(err, berr); err != nil {
			return err
		}
		if a != b {
			return differs
		}
		return nil
	case base.size != st.size:
		return differs
	}
	a, err := p.base.read(name)
	if err != nil {
		return err
	}
	defer a.Close() // only read
	b, err := p.to.read(at)
	if err != nil {
		return err
	}
	defer b.Close() // only read
	if same, err := equal(a, b); err != nil || !same {
		return errors.Join(err, differs)
	}
	return nil
}

// protects reports whether a tree of the host has a protected name.
func (p *Plan) protects(dir string) bool {
	names, err := p.to.list(dir)
	if err != nil {
		return true // unknown
	}
	for _, base := range names {
		name := dir + "/" + base
		if p.protected(name) {
			return true
		}
		if st, err := p.to.stat(name); err != nil || st.kind == directory && p.protects(name) {
			return true
		}
	}
	return false
}

// inRepository reports whether a path lies in a directory that git takes for a repository without a
// name: it has HEAD and objects or refs, in the set or on the host. Its config names programs that
// git executes, also for a question like git status, and what else it has a new version may trust.
func (p *Plan) inRepository(name string) bool {
	for dir := path.Dir(name); ; dir = path.Dir(dir) {
		is, known := p.repositories[dir]
		if !known {
			is = fold(path.Base(dir)) != ".git" && p.holds(dir, "HEAD") && (p.holds(dir, "objects") || p.holds(dir, "refs"))
			p.repositories[dir] = is
		}
		if is || dir == "." {
			return is
		}
	}
}

// holds reports whether a directory has a name in the set or on the host.
func (p *Plan) holds(dir, base string) bool {
	if p.set.folded[path.Join(dir, fold(base))] {
		return true
	}
	st, err := p.to.stat(path.Join(dir, base))
	return err == nil && st.kind != none
}

// Select returns the items at or below the paths, and the new directories that those lie in; all
// without paths. A path that selects nothing is an error.
func (p *Plan) Select(paths []string) ([]*Item, error) {
	if len(paths) == 0 {
		return p.Items, nil
	}
	used := make([]bool, len(paths))
	wanted := make(map[string]bool)
	for _, item := range p.Items {
		for i, want := range paths {
			want = path.Clean(strings.TrimSuffix(want, "/"))
			if want == "." || item.Path == want || strings.HasPrefix(item.Path, want+"/") {
				used[i], wanted[item.Path] = true, true
			}
		}
		for dir := path.Dir(item.Path); wanted[item.Path] && p.gone[dir]; dir = path.Dir(dir) {
			wanted[dir] = true
		}
	}
	if i := slices.Index(used, false); i >= 0 {
		return nil, fmt.Errorf("no change is at or below %s", Quote(paths[i]))
	}
	return slices.DeleteFunc(slices.Clone(p.Items), func(item *Item) bool { return !wanted[item.Path] }), nil
}

// reason returns an error as words for an item.
func reason(err error) string {
	switch {
	case errors.Is(err, unix.ELOOP):
		return "a link is on the way"
	case errors.Is(err, unix.EXDEV):
		return "a mount is on the way"
	}
	return err.Error()
}
