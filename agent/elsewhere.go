package agent

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/api"
)

const (
	// maxElsewhere bounds the recorded files outside of the output directory.
	maxElsewhere = 100
	// maxLooked bounds the entries of one look at the sandbox's files.
	maxLooked = 50_000
	// maxTopDirs bounds the directories at the root that are looked into, each by a request.
	maxTopDirs = 100
)

// systemDirs hold the image's own software. Changes there are those of package managers, and are
// not listed.
var systemDirs = []string{
	"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "nix", "opt", "proc", "run", "sbin", "snap", "sys", "usr", "var",
}

// fileMarks tells the files that a run has changed from those that its sandbox began with.
type fileMarks struct {
	seed  maphash.Seed
	known map[uint64]struct{} // of unchanged files, by name and attributes
	whole bool                // known holds all files
	since time.Time           // files of which it is not known are judged by their time
}

// fileMark identifies a state of a file.
type fileMark struct {
	path, target string
	size         int64
	changed      int64
}

func (m *fileMarks) mark(e api.FileEntry) uint64 {
	return maphash.Comparable(m.seed, fileMark{e.Path, e.Target, e.Size, e.MTime.UnixNano()})
}

// isChanged reports whether a file was made or changed since the marks.
func (m *fileMarks) isChanged(e api.FileEntry) bool {
	if _, ok := m.known[m.mark(e)]; ok {
		return false
	}
	return m.whole || !e.MTime.Before(m.since)
}

// markFiles marks the sandbox's files before the first turn. Without marks the end of the run
// judges files by their time alone, so an error is none of the run.
func (r *run) markFiles(ctx context.Context) {
	m := &fileMarks{seed: maphash.MakeSeed(), known: map[uint64]struct{}{}, since: r.l.started}
	more, err := r.lookElsewhere(ctx, func(e api.FileEntry) { m.known[m.mark(e)] = struct{}{} })
	m.whole = err == nil && !more
	r.marks = m
}

// lookElsewhere calls on for the files of the sandbox outside of its output directory and its
// system directories, at most maxLooked entries. More reports omissions.
func (r *run) lookElsewhere(ctx context.Context, on func(api.FileEntry)) (more bool, err error) {
	prompt := r.l.run.Prompt
	var dirs []string
	left := maxLooked
	more, err = r.sandbox.list(ctx, "/", 1, func(e api.FileEntry) error {
		if left--; left < 0 || len(dirs) >= maxTopDirs {
			return errEnough
		}
		if r.l.run.RepoDir != "" && isBelow(e.Path, prompt.WorkingDir) {
			return nil // the patch has it
		}
		if e.Type == api.TypeDirectory && !slices.Contains(systemDirs, path.Base(e.Path)) {
			dirs = append(dirs, e.Path)
		}
		return nil
	})
	if errors.Is(err, errEnough) {
		more, err = true, nil
	}
	if err != nil {
		return false, fmt.Errorf("list the files of the sandbox: %w", err)
	}
	if r.l.run.RepoDir == "" && !slices.ContainsFunc(dirs, func(dir string) bool { return isBelow(prompt.WorkingDir, dir) }) {
		dirs = append(dirs, prompt.WorkingDir) // in a system directory
	}
	for _, dir := range dirs {
		listMore, err := r.sandbox.List(ctx, dir, func(e api.FileEntry) error {
			if r.l.run.RepoDir != "" && isBelow(e.Path, prompt.WorkingDir) {
				return nil
			}
			if left--; left < 0 {
				return errEnough
			}
			if e.Type != api.TypeDirectory && !isBelow(e.Path, prompt.OutputDir) && !isCache(e.Path) && !isOurScript(e.Path) {
				on(e)
			}
			return nil
		})
		switch {
		case errors.Is(err, errEnough):
			return true, nil
		case hasCode(err, api.CodeNotFound), hasCode(err, api.CodeInvalid), hasCode(err, api.CodeConflict): // it is gone, or no directory now
		case err != nil:
			return more, fmt.Errorf("list the files of the sandbox: %w", err)
		}
		more = more || listMore
	}
	return more, nil
}

// isBelow reports whether a clean path is dir or below it.
func isBelow(name, dir string) bool {
	return name == dir || dir == "/" || strings.HasPrefix(name, dir+"/")
}

// isCache reports whether a file is in a directory that programs fill by themselves.
func isCache(name string) bool {
	return strings.Contains(name, "/.cache/") || strings.Contains(name, "/__pycache__/")
}

// isOurScript reports whether a file holds a command that was too long for argv.
func isOurScript(name string) bool { return strings.HasPrefix(name, "/tmp/.command-") }

// outsideOutput is the reason why a file that no option names stays in the sandbox.
const outsideOutput = "outside of the output directory"

// listElsewhere adds the files to out that the run has made or changed outside of its output
// directory. They do not leave the sandbox, unless the run's options name them.
func (r *run) listElsewhere(ctx context.Context, out *Outputs) error {
	marks := r.marks
	if marks == nil { // the process that made the sandbox has ended
		marks = &fileMarks{seed: maphash.MakeSeed(), since: r.l.started}
	}
	g, err := r.l.run.Collect.newFilter()
	if err != nil {
		return err
	}
	more, err := r.lookElsewhere(ctx, func(e api.FileEntry) {
		if !marks.isChanged(e) {
			return
		}
		out.ElsewhereEntries++
		if len(out.Elsewhere) >= maxElsewhere {
			return
		}
		o := Output{Path: clipMiddle(e.Path, 1000), Type: e.Type, Size: max(e.Size, 0), Stays: outsideOutput}
		for _, dir := range r.l.run.Collect.Paths {
			if isBelow(e.Path, dir) {
				o.Stays = g.reject(strings.TrimPrefix(strings.TrimPrefix(e.Path, dir), "/"), o.Size)
			}
		}
		out.Elsewhere = append(out.Elsewhere, o)
	})
	out.More = out.More || more
	slices.SortFunc(out.Elsewhere, func(a, b Output) int { return strings.Compare(a.Path, b.Path) })
	return err
}

// checkPaths returns the paths to collect beside the output directory, absolute and clean.
func checkPaths(paths []string, prompt PromptConfig) ([]string, error) {
	var all, out []string
	for _, p := range paths {
		if p == "" || strings.ContainsRune(p, 0) {
			return nil, fmt.Errorf("collect %q: want a path in the sandbox", p)
		}
		if !path.IsAbs(p) {
			p = path.Join(prompt.WorkingDir, p)
		}
		p = path.Clean(p)
		if p == "/" || depth(p) > maxDepth {
			return nil, fmt.Errorf("collect %s: want a file or directory below the root", clipMiddle(p, 200))
		}
		all = append(all, p)
	}
	for _, p := range slices.Sorted(slices.Values(all)) { // a directory precedes its contents
		if !slices.ContainsFunc(append(out, path.Clean(prompt.OutputDir)), func(dir string) bool { return isBelow(p, dir) }) {
			out = append(out, p) // otherwise it is collected anyway
		}
	}
	return out, nil
}

// collectElsewhere collects the files that the run's options name, into dir. Their limits are the
// rest that the output has left.
func (r *run) collectElsewhere(ctx context.Context, dir string, output *Collected) (out map[string]*Collected, err error) {
	limits := r.l.run.Collect
	setDefault(&limits.Entries, DefaultCollectLimits.Entries)
	setDefault(&limits.Bytes, DefaultCollectLimits.Bytes)
	limits.Entries, limits.Bytes = limits.Entries-output.Entries, limits.Bytes-output.Bytes
	out = map[string]*Collected{}
	for _, p := range r.l.run.Collect.Paths {
		if limits.Entries < 1 || limits.Bytes < 1 {
			return out, fmt.Errorf("collect %s: the limit of the output is reached", p)
		}
		entry, err := r.sandbox.api.StatFile(ctx, r.sandbox.id, p, true)
		if hasCode(err, api.CodeNotFound) {
			out[p] = &Collected{}
			out[p].skip(p, err.Error())
			continue
		}
		if err != nil {
			return out, fmt.Errorf("collect %s: %w", p, err)
		}
		below, source := p, p
		if entry.Type != api.TypeDirectory { // the archive of a file has one entry, of its name
			below, source = path.Dir(p), path.Dir(p)
		}
		dest := filepath.Join(dir, filepath.FromSlash(below))
		if err := os.MkdirAll(dest, 0o755); err != nil { //nolint:gosec // results are meant to be read by others, as the umask allows
			return out, fmt.Errorf("make the directory for %s: %w", p, err)
		}
		c, err := collectInto(ctx, r.sandbox, p, source, dest, limits)
		if c != nil {
			out[p] = c
			limits.Entries, limits.Bytes = limits.Entries-c.Entries, limits.Bytes-c.Bytes
		}
		if err != nil {
			return out, err
		}
	}
	return out, nil
}
