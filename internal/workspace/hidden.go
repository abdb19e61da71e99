package workspace

import (
	"path"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/api"
)

// A sandbox does not see the hidden paths of its workspace, so nothing that it does is about the
// files that the host has there. A file that it makes at such a path is in conflict with the
// host's. A directory that it deletes stays on the host with what is hidden in it.

// hiddenPaths are the hidden paths of a workspace: none lies below another.
type hiddenPaths struct {
	sorted []string
	set    map[string]bool
}

func newHiddenPaths(paths []string) hiddenPaths {
	h := hiddenPaths{slices.Sorted(slices.Values(paths)), make(map[string]bool, len(paths))}
	for _, p := range paths {
		h.set[p] = true
	}
	return h
}

// isHidden reports whether a path is hidden, and the host has something there.
func (p *Plan) isHidden(name string) bool {
	for at := name; at != "." && len(p.hidden.set) > 0; at = path.Dir(at) {
		if p.hidden.set[at] {
			return p.exists(at)
		}
	}
	return false
}

// keeps reports whether the host has something hidden below a directory.
func (p *Plan) keeps(dir string) bool {
	at, _ := slices.BinarySearch(p.hidden.sorted, dir+"/")
	for _, name := range p.hidden.sorted[at:] {
		if !strings.HasPrefix(name, dir+"/") {
			break
		}
		if p.exists(name) {
			return true
		}
	}
	return false
}

func (p *Plan) exists(name string) bool {
	st, err := p.to.stat(name)
	return err != nil || st.kind != none // an unknown file is left alone
}

// atHidden adds the item of a file that a sandbox made at a hidden path, unless the host has the
// like, as after an apply.
func (p *Plan) atHidden(e *entry) error {
	if e.kind == none {
		return nil
	}
	was, err := p.to.stat(e.path)
	if err != nil {
		was = state{kind: special}
	}
	if same, err := p.equal(e, &was); err != nil || same {
		return err
	}
	item := &Item{Path: e.path, Kind: api.Added, Type: e.kind.String(), Size: e.size, Protected: p.protected(e.path), e: e}
	if item.Conflict = "the sandbox did not see what the host has there"; e.kind == special {
		item.Conflict, item.Refused = "", "special files are left out"
	}
	p.Items = append(p.Items, item)
	return nil
}

// deleted adds the deletion of the host's file or directory at a name. A directory with hidden
// paths stays, and the rest of it is deleted piece by piece.
func (p *Plan) deleted(name string, e *entry, was *state) error {
	if was.kind != directory || !p.keeps(name) {
		item := &Item{Path: name, Kind: api.Deleted, Type: was.kind.String(), Size: was.size, Protected: p.protected(name), e: e, was: *was}
		p.judge(item)
		p.Items = append(p.Items, item)
		return nil
	}
	return p.hides(name)
}
