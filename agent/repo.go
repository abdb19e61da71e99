package agent

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/workspace"
)

// The files in a run's directory that hold the changes of its repository. ConflictsName has
// those of files that were changed on the host during the run: applied, it would undo that.
const (
	PatchName     = "changes.patch"
	ConflictsName = "conflicts.patch"
)

// Patch describes the changes of a run's repository.
type Patch struct {
	File    string `json:"file"` // absolute, on the host
	Changes int    `json:"changes"`
	// Protected are changed paths that programs of the host would execute or trust, at most 100; a
	// last line counts the others.
	Protected []string `json:"protected,omitempty"`
	// Conflicts is the number of changes that are in [ConflictsName] instead.
	Conflicts int `json:"conflicts,omitempty"`
	// Skipped names the changes that no patch has, with the reasons, at most 100; a last line
	// counts the others. InGit is the number of changes of git's own files, which no patch can
	// have.
	Skipped []string `json:"skipped,omitempty"`
	InGit   int      `json:"in_git,omitempty"`
}

// checkRepo checks the options of a run with a repository, and makes its path absolute.
func (o *Options) checkRepo() error {
	fi, err := os.Stat(o.RepoDir)
	switch {
	case err != nil:
		return fmt.Errorf("repository: %w", err)
	case !fi.IsDir():
		return fmt.Errorf("repository %s: not a directory", o.RepoDir)
	case o.SnapshotTurns:
		return errors.New("a snapshot has no files of the repository: leave out the snapshots of turns, or copy the files in with the input directory")
	}
	if o.RepoDir, err = filepath.Abs(o.RepoDir); err == nil {
		o.RepoDir, err = filepath.EvalSymlinks(o.RepoDir)
	}
	if err != nil {
		return fmt.Errorf("repository: %w", err)
	}
	if o.OutputDir == "" {
		o.OutputDir = "output"
	}
	switch at, err := within(o.RepoDir, o.OutputDir); {
	case err != nil:
		return fmt.Errorf("output directory: %w", err)
	case at == ".":
		return fmt.Errorf("the output directory %s is the repository itself: name another", o.OutputDir)
	}
	return nil
}

// within returns the path of a directory, which need not be there, below another; empty if it
// lies elsewhere.
func within(dir, name string) (string, error) {
	name, err := filepath.Abs(name)
	if err != nil {
		return "", err
	}
	// Links are followed as far as there is something.
	var missing []string
	for {
		real, err := filepath.EvalSymlinks(name)
		if err == nil {
			name = filepath.Join(append([]string{real}, missing...)...)
			break
		}
		if !errors.Is(err, os.ErrNotExist) {
			return "", err
		}
		missing = append([]string{filepath.Base(name)}, missing...)
		name = filepath.Dir(name)
	}
	if rel, err := filepath.Rel(dir, name); err == nil && filepath.IsLocal(rel) {
		return rel, nil
	}
	return "", nil
}

// besideRepo puts the directories that lie in the working directory beside it: files copied
// there would be changes of the repository.
func (c PromptConfig) besideRepo() PromptConfig {
	for _, dir := range []*string{&c.InputDir, &c.OutputDir} {
		if clean := path.Clean(*dir); isBelow(clean, path.Clean(c.WorkingDir)) && path.Clean(c.WorkingDir) != "/" {
			*dir = path.Clean(c.WorkingDir) + "-" + path.Base(clean)
		}
	}
	return c
}

// repoPrompt returns the paragraph of the prompt about the repository.
func repoPrompt(workingDir string) string {
	return fmt.Sprintf("\n\n<REPOSITORY>\n%s holds the project that the task is about. Change its files in place: the differences are handed back as a patch when you submit. Commits are not.\n</REPOSITORY>", workingDir)
}

// withRepo adds the workspace of the run's repository to the request for a sandbox. The
// run's own output directory is hidden, if it lies in the repository.
func (r *run) withRepo(ctx context.Context, req *api.CreateSandbox) error {
	dir := r.l.run.RepoDir
	if dir == "" {
		return nil
	}
	if r.InputAllowed != nil {
		return errors.New("a run that the daemon hosts has no repository: it may not read directories of the host; use sandboxd agent run --repo")
	}
	w, err := workspace.Describe(ctx, dir, r.l.run.GitIgnore)
	if err != nil {
		return fmt.Errorf("repository: %w", err)
	}
	w.Target = path.Clean(r.l.run.Prompt.WorkingDir)
	if r.dir != "" {
		at, err := within(w.Source, filepath.Dir(r.dir))
		if err != nil {
			return fmt.Errorf("repository: %w", err)
		}
		if at != "" && at != "." && !slices.Contains(w.Hidden, at) {
			w.Hidden = append(w.Hidden, at)
			r.OnNote(fmt.Sprintf("%s, with the results of runs, is hidden from the sandbox", at))
		}
	}
	req.Workspace = w
	// As an ordinary user's the repository belongs to another id than that of the programs.
	req.Env = append(req.Env, "GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*")
	return nil
}

// collectPatch leaves the changes of the repository in the run's directory.
func (r *run) collectPatch(ctx context.Context) (*Patch, error) {
	p, err := writePatches(ctx, r.sandbox.api, r.sandbox.id, r.dir)
	if err != nil {
		return nil, fmt.Errorf("collect the changes of the repository: %w", err)
	}
	return p, nil
}

func writePatches(ctx context.Context, c *client.Client, id, dir string) (_ *Patch, err error) {
	w, err := workspace.Compare(ctx, c, id, "")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	p := &Patch{File: filepath.Join(dir, PatchName)}
	if p.File, err = filepath.Abs(p.File); err != nil {
		return nil, err
	}
	var clean, conflicts []*workspace.Item
	left := &Collected{}
	protected := 0
	for _, item := range w.Items {
		switch {
		case slices.Contains(strings.Split(strings.ToLower(item.Path), "/"), ".git"):
			p.InGit++
		case item.Refused != "":
			left.skip(item.Path, item.Refused)
		case item.Conflict != "":
			left.skip(item.Path, item.Conflict+"; it is in "+ConflictsName)
			conflicts = append(conflicts, item)
		default:
			clean = append(clean, item)
			if item.Note != "" {
				left.skip(item.Path, item.Note)
			}
			if item.Protected {
				protected++
				if len(p.Protected) < maxSkipped {
					p.Protected = append(p.Protected, clipMiddle(visible(item.Path), 300))
				}
			}
		}
	}
	if more := protected - len(p.Protected); more > 0 {
		p.Protected = append(p.Protected, fmt.Sprintf("and %d more", more))
	}
	if left.dropped > 0 {
		left.Skipped = append(left.Skipped, fmt.Sprintf("and %d more", left.dropped))
	}
	p.Changes, p.Conflicts, p.Skipped = len(clean), len(conflicts), left.Skipped
	if err := savePatch(w, clean, p.File); err != nil {
		return nil, err
	}
	at := filepath.Join(dir, ConflictsName)
	if len(conflicts) == 0 {
		if err := os.Remove(at); err != nil && !errors.Is(err, os.ErrNotExist) { // of an earlier end
			return nil, err
		}
		return p, nil
	}
	return p, savePatch(w, conflicts, at)
}

// savePatch writes a patch as a whole or not at all.
func savePatch(w *workspace.Comparison, items []*workspace.Item, name string) (err error) {
	f, err := os.CreateTemp(filepath.Dir(name), ".patch-")
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("write %s: %w", name, err), os.Remove(f.Name()))
		}
	}()
	out := bufio.NewWriter(f)
	err = w.WritePatch(out, items, nil)
	if err = errors.Join(err, out.Flush(), f.Chmod(0o644), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), name)
}
