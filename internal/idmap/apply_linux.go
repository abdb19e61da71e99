package idmap

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Apply writes the maps of process pid, a child of the caller that has just been cloned into a new
// user namespace and waits. Both maps can be written once only; on error the child is of no use and
// is to be killed.
//
// Until Apply has returned, every id in the child reads as 65534. The child must heed these rules:
//
//   - A program executed before the maps were written has lost its capabilities (execve by an
//     unmapped uid drops them) unless they were ambient. It gets them back by executing itself once
//     more as uid 0.
//   - With [Direct] the child still runs as the host's root, which the map leaves out. It must call
//     setgroups(nil), setresgid(0) and setresuid(0) before anything else, and needs ambient
//     capabilities (SETUID, SETGID) to do so.
//   - With [Single], setgroups(2) is refused in the namespace for good.
func Apply(ctx context.Context, pid int, p Plan) error {
	if err := p.Validate(); err != nil {
		return fmt.Errorf("apply id maps: %w", err)
	}
	proc, err := os.OpenRoot(filepath.Join("/proc", strconv.Itoa(pid)))
	if err != nil {
		return fmt.Errorf("apply id maps: %w", err)
	}
	defer proc.Close()
	switch p.Method {
	case Direct:
		err = errors.Join(write(proc, "uid_map", kernelForm(p.UID)), write(proc, "gid_map", kernelForm(p.GID)))
	case Helpers:
		err = errors.Join(runHelper(ctx, p.NewUIDMap, pid, p.UID), runHelper(ctx, p.NewGIDMap, pid, p.GID))
	case Single:
		// Since Linux 3.19 an unprivileged gid_map can be written only after setgroups has been denied:
		// otherwise a process could drop a group by which a file denies it access (CVE-2014-8989).
		err = errors.Join(
			write(proc, "setgroups", "deny"),
			write(proc, "uid_map", kernelForm(p.UID)),
			write(proc, "gid_map", kernelForm(p.GID)),
		)
	}
	if err != nil {
		return fmt.Errorf("apply id maps to process %d: %w", pid, err)
	}
	return Verify(pid, p)
}

// Verify reads the maps of process pid back and compares them with the plan.
func Verify(pid int, p Plan) error {
	for name, want := range map[string][]Range{"uid_map": p.UID, "gid_map": p.GID} {
		got, err := readMap(strconv.Itoa(pid), name)
		if err != nil {
			return fmt.Errorf("verify id maps: %w", err)
		}
		// With more than five lines the kernel sorts them.
		slices.SortFunc(got, func(a, b Range) int { return cmp.Compare(a.Inside, b.Inside) })
		if !slices.Equal(got, want) {
			return fmt.Errorf("verify id maps: %s of process %d is %v, not %v", name, pid, got, want)
		}
	}
	return nil
}

func kernelForm(m []Range) string {
	var b strings.Builder
	for _, r := range m {
		fmt.Fprintf(&b, "%d %d %d\n", r.Inside, r.Outside, r.Size)
	}
	return b.String()
}

// write writes text in one call, as the kernel demands of these files.
func write(proc *os.Root, name, text string) error {
	f, err := proc.OpenFile(name, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

func runHelper(ctx context.Context, path string, pid int, m []Range) error {
	args := []string{strconv.Itoa(pid)}
	for _, r := range m {
		args = append(args, strconv.Itoa(r.Inside), strconv.Itoa(r.Outside), strconv.Itoa(r.Size))
	}
	cmd := exec.CommandContext(ctx, path, args...) //nolint:gosec // G204: the program was found and examined by FindHelpers
	cmd.Env = []string{}                           // it needs nothing of ours
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", filepath.Base(path), err, bytes.TrimSpace(out))
	}
	return nil
}
