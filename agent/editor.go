package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/api"
)

// maxEditable bounds the files that the editor reads, in bytes: several copies are in memory.
const maxEditable = 64 << 20

// maxListed bounds the entries of a directory view.
const maxListed = 100

// snippetLines is the number of lines shown on each side of an edit.
const snippetLines = 4

// editorArgs holds the arguments of str_replace_editor. A nil field was not given.
type editorArgs struct {
	Command    string     `json:"command"`
	Path       *string    `json:"path"`
	FileText   *string    `json:"file_text"`
	OldStr     *string    `json:"old_str"`
	NewStr     *string    `json:"new_str"`
	InsertLine *integer   `json:"insert_line"`
	ViewRange  *[]integer `json:"view_range"`
}

// extraArgument returns an error for an argument that the command does not take. Some models fill
// in every field of a schema, so an empty value passes.
func (a editorArgs) extraArgument(allowed ...string) error {
	given := map[string]bool{
		"file_text":   a.FileText != nil && *a.FileText != "",
		"old_str":     a.OldStr != nil && *a.OldStr != "",
		"new_str":     a.NewStr != nil && *a.NewStr != "",
		"insert_line": a.InsertLine != nil && *a.InsertLine != 0,
		"view_range":  a.ViewRange != nil && len(*a.ViewRange) > 0,
	}
	for _, name := range allowed {
		delete(given, name)
	}
	for _, name := range []string{"file_text", "old_str", "new_str", "insert_line", "view_range"} {
		if given[name] {
			return toolErrorf("Error: argument `%s` does not go with command `%s`.", name, a.Command)
		}
	}
	return nil
}

// check finds missing and extra arguments, as far as that needs no access to the file.
func (a editorArgs) check() error {
	var allowed []string
	switch a.Command {
	case "view":
		allowed = []string{"view_range"}
	case "create":
		allowed = []string{"file_text"}
	case "str_replace":
		allowed = []string{"old_str", "new_str"}
	case "insert":
		allowed = []string{"insert_line", "new_str"}
	case "":
		return toolErrorf("Error: argument `command` is required: view, create, str_replace or insert.")
	default:
		return toolErrorf("Error: unknown command %s; want view, create, str_replace or insert.", quoteBrief(a.Command))
	}
	if err := a.extraArgument(allowed...); err != nil {
		return err
	}
	switch {
	case a.Path == nil || *a.Path == "":
		return toolErrorf("Error: argument `path` is required.")
	case strings.ContainsRune(*a.Path, 0):
		return toolErrorf("Error: the path holds a NUL character.")
	case len(*a.Path) > 4095:
		return toolErrorf("Error: the path is longer than 4095 bytes.")
	case a.Command == "create" && a.FileText == nil:
		return toolErrorf("Error: argument `file_text` is required for command `create`.")
	case a.Command == "str_replace" && (a.OldStr == nil || *a.OldStr == ""):
		return toolErrorf("Error: argument `old_str` is required for command `str_replace` and must not be empty.")
	case a.Command == "insert" && a.InsertLine == nil:
		return toolErrorf("Error: argument `insert_line` is required for command `insert`.")
	case a.Command == "insert" && a.NewStr == nil:
		return toolErrorf("Error: argument `new_str` is required for command `insert`.")
	}
	return nil
}

// edit runs one checked call of str_replace_editor. The sandbox resolves the path.
func (t *toolbox) edit(ctx context.Context, a editorArgs) (string, error) {
	p := *a.Path
	if !path.IsAbs(p) {
		p = path.Join(t.workingDir, p)
	}
	switch a.Command {
	case "view":
		return t.view(ctx, p, a.ViewRange)
	case "create":
		return t.create(ctx, p, []byte(*a.FileText))
	case "str_replace":
		var replacement string
		if a.NewStr != nil {
			replacement = *a.NewStr
		}
		return t.strReplace(ctx, p, []byte(*a.OldStr), []byte(replacement))
	default:
		return t.insert(ctx, p, int(*a.InsertLine), []byte(*a.NewStr))
	}
}

// errNotRegular is the error of read for a path that exists and is no regular file.
var errNotRegular = errors.New("not a regular file")

// read returns the content of a file.
func (t *toolbox) read(ctx context.Context, p string) ([]byte, error) {
	r, err := t.sandbox.ReadFile(ctx, p)
	switch {
	case hasCode(err, api.CodeNotFound):
		return nil, toolErrorf("Error: The path %s does not exist. Please provide a valid path.", p)
	case hasCode(err, api.CodeInvalid), hasCode(err, api.CodeConflict):
		return nil, fmt.Errorf("%w: %w", errNotRegular, err)
	case err != nil:
		return nil, t.refused("read "+p, err)
	}
	data, err := io.ReadAll(io.LimitReader(r, maxEditable+1))
	if closeErr := r.Close(); err == nil {
		err = closeErr
	}
	switch {
	case err != nil:
		return nil, t.refused("read "+p, err)
	case len(data) > maxEditable:
		return nil, toolErrorf("Error: %s is larger than %d MiB; look at it and change it with %s.", p, maxEditable>>20, ToolBash)
	}
	return data, nil
}

// readText returns the content of a text file.
func (t *toolbox) readText(ctx context.Context, p string) ([]byte, error) {
	data, err := t.read(ctx, p)
	if errors.Is(err, errNotRegular) {
		return nil, toolErrorf("Error: %s is not a regular file.", p)
	}
	if err != nil {
		return nil, err
	}
	if binary(data) {
		return nil, toolErrorf("Error: %s is a binary file (%d bytes); look at it and change it with %s.", p, len(data), ToolBash)
	}
	return data, nil
}

// binary reports whether data is not text. Text in an encoding other than UTF-8 counts as text.
func binary(data []byte) bool {
	return bytes.IndexByte(data[:min(len(data), 8<<10)], 0) >= 0
}

func (t *toolbox) view(ctx context.Context, p string, viewRange *[]integer) (string, error) {
	data, err := t.read(ctx, p)
	if errors.Is(err, errNotRegular) {
		if viewRange != nil && len(*viewRange) > 0 {
			return "", toolErrorf("Error: `view_range` is for files, and %s is not a regular file.", p)
		}
		return t.list(ctx, p)
	}
	if err != nil {
		return "", err
	}
	if binary(data) {
		return "", toolErrorf("Error: %s is a binary file (%d bytes); look at it with %s (file, od -c, ...).", p, len(data), ToolBash)
	}
	all := lines(data)
	first, last := 1, len(all)
	if viewRange != nil && len(*viewRange) > 0 {
		if first, last, err = checkRange(*viewRange, len(all)); err != nil {
			return "", err
		}
	}
	head := fmt.Sprintf("Here's the result of running `cat -n` on %s:\n", p)
	if len(all) == 0 {
		return head + "(the file is empty)\n", nil
	}
	return head + t.numbered(all[first-1:last], first), nil
}

// checkRange validates [first, last] for a file of n lines and resolves -1.
func checkRange(r []integer, n int) (first, last int, err error) {
	if len(r) != 2 {
		return 0, 0, toolErrorf("Error: Invalid `view_range`: want two integers, [first, last], got %d.", len(r))
	}
	first, last = int(r[0]), int(r[1])
	if last == -1 {
		last = n
	}
	switch {
	case first < 1 || first > n:
		return 0, 0, toolErrorf("Error: Invalid `view_range`: [%d, %d]. The first line must be between 1 and %d, the file's last line.", r[0], r[1], n)
	case last < first:
		return 0, 0, toolErrorf("Error: Invalid `view_range`: [%d, %d]. The last line must not come before the first; -1 means the end.", r[0], r[1])
	case last > n:
		return 0, 0, toolErrorf("Error: Invalid `view_range`: [%d, %d]. The file has %d lines; -1 means the end.", r[0], r[1], n)
	}
	return first, last, nil
}

// numbered formats lines as cat -n does, beginning with number first. Beyond the limit it cuts out
// the middle, between lines if they are short enough. The gap names the view_range that shows it.
func (t *toolbox) numbered(l [][]byte, first int) string {
	const longest = 4000 // bytes of one line; minified files have a single one
	half := t.outputLimit / 2
	show := func(i int) string {
		text := strings.TrimSuffix(strings.ToValidUTF8(string(l[i]), "\uFFFD"), "\n")
		return fmt.Sprintf("%6d\t%s\n", first+i, clipMiddle(text, longest))
	}
	var head, tail []string
	size, from := 0, 0
	for ; from < len(l); from++ {
		s := show(from)
		if size+len(s) > half && from > 0 {
			break
		}
		head, size = append(head, s), size+len(s)
	}
	size = 0
	to := len(l)
	for to > from {
		s := show(to - 1)
		if size+len(s) > half {
			break
		}
		tail, size, to = append(tail, s), size+len(s), to-1
	}
	var b strings.Builder
	for _, s := range head {
		b.WriteString(s)
	}
	if to > from {
		fmt.Fprintf(&b, "%s<Lines %d to %d left out for saving context; see them with view_range>%s\n", dashes, first+from, first+to-1, dashes)
	}
	for _, s := range slices.Backward(tail) {
		b.WriteString(s)
	}
	return b.String()
}

// list shows a directory two levels deep.
func (t *toolbox) list(ctx context.Context, p string) (string, error) {
	// The slash makes find follow a link to a directory and refuse other files. -print0 keeps names
	// with newlines intact.
	out, ok, err := t.runProgram(ctx, "find", strings.TrimRight(p, "/")+"/", "-mindepth", "1", "-maxdepth", "2",
		"(", "-name", ".*", "-prune", ")", "-o", "-print0")
	if err != nil {
		return "", err
	}
	if !ok {
		return "", toolErrorf("Error: cannot view %s: it is neither a regular file nor a directory that can be listed.", p)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "Here's the files and directories up to 2 levels deep in %s, excluding hidden:\n%s\n", p, p)
	names := bytes.Split(bytes.TrimSuffix(out, []byte{0}), []byte{0})
	for i, name := range names {
		if i == maxListed || i == len(names)-1 && len(out) >= captureBytes {
			fmt.Fprintf(&b, "... and more; list them with %s\n", ToolBash)
			break
		}
		if len(name) > 0 {
			b.WriteString(visible(strings.Replace(string(name), "//", "/", 1)) + "\n")
		}
	}
	return b.String(), nil
}

// visible returns a file name on one line.
func visible(name string) string {
	if strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return strconv.Quote(name)
	}
	return strings.ToValidUTF8(name, "\uFFFD")
}

func (t *toolbox) create(ctx context.Context, p string, content []byte) (string, error) {
	replaced, err := t.write(ctx, p, content)
	if err != nil {
		return "", err
	}
	note := ""
	if replaced {
		note = " (the file that was there is replaced)"
	}
	return fmt.Sprintf("File created at %s%s. Here's the result of running `cat -n` on %s:\n%sReview the file and make sure that it is as expected. Edit the file if necessary.\n",
		p, note, p, t.numbered(lines(content), 1)), nil
}

func (t *toolbox) strReplace(ctx context.Context, p string, old, replacement []byte) (string, error) {
	data, err := t.readText(ctx, p)
	if err != nil {
		return "", err
	}
	at := occurrences(data, old)
	switch {
	case len(at) == 0:
		hint := ""
		if bytes.Contains(data, []byte("\r\n")) && bytes.Contains(old, []byte("\n")) && !bytes.Contains(old, []byte("\r\n")) {
			hint = ` Its lines end in "\r\n": old_str must have these too.`
		}
		return "", toolErrorf("Error: No occurrences of old_str found in %s for replacement.%s", p, hint)
	case len(at) > 1:
		var numbers []string
		for _, offset := range at[:min(len(at), 20)] {
			numbers = append(numbers, strconv.Itoa(1+bytes.Count(data[:offset], []byte("\n"))))
		}
		return "", toolErrorf("Error: Multiple occurrences (%d) of old_str found in %s, at lines %s. Please ensure it is unique before replacing.", len(at), p, strings.Join(numbers, ", "))
	}
	changed := make([]byte, 0, len(data)-len(old)+len(replacement))
	changed = append(changed, data[:at[0]]...)
	changed = append(changed, replacement...)
	changed = append(changed, data[at[0]+len(old):]...)
	return t.edited(ctx, p, changed, 1+bytes.Count(data[:at[0]], []byte("\n")), bytes.Count(replacement, []byte("\n")))
}

// occurrences returns the offsets of old, overlapping ones included: in "aaa", "aa" is as ambiguous
// as in "aa aa". It stops at a thousand.
func occurrences(data, old []byte) []int {
	var at []int
	for offset := 0; len(at) < 1000; {
		i := bytes.Index(data[offset:], old)
		if i < 0 {
			break
		}
		at = append(at, offset+i)
		offset += i + 1
	}
	return at
}

func (t *toolbox) insert(ctx context.Context, p string, after int, text []byte) (string, error) {
	data, err := t.readText(ctx, p)
	if err != nil {
		return "", err
	}
	all := lines(data)
	if after < 0 || after > len(all) {
		return "", toolErrorf("Error: Invalid `insert_line` %d: it must be between 0 and %d, the number of lines of %s.", after, len(all), p)
	}
	before := bytes.Join(all[:after], nil)
	rest := data[len(before):]
	newline := []byte("\n")
	// Add a newline only where lines would join, and at the end of a file that had one.
	var changed []byte
	changed = append(changed, before...)
	endsLine := bytes.HasSuffix(before, newline)
	if len(before) > 0 && !endsLine {
		changed = append(changed, '\n')
	}
	changed = append(changed, text...)
	if !bytes.HasSuffix(text, newline) && (len(rest) > 0 || endsLine) {
		changed = append(changed, '\n')
	}
	changed = append(changed, rest...)
	return t.edited(ctx, p, changed, after+1, bytes.Count(bytes.TrimSuffix(text, newline), newline))
}

// edited writes the changed file and shows the lines around the change, which begins at line first
// and spans more further lines.
func (t *toolbox) edited(ctx context.Context, p string, changed []byte, first, more int) (string, error) {
	if _, err := t.write(ctx, p, changed); err != nil {
		return "", err
	}
	all := lines(changed)
	from, to := max(1, first-snippetLines), min(len(all), first+more+snippetLines)
	var snippet string
	if from <= to {
		snippet = t.numbered(all[from-1:to], from)
	} else {
		snippet = "(the file is empty)\n"
	}
	return fmt.Sprintf("The file %s has been edited. Here's the result of running `cat -n` on a snippet of %s:\n%sReview the changes and make sure they are as expected. Edit the file again if necessary.\n", p, p, snippet), nil
}

// write replaces or creates the file at p. The files API replaces files by renaming. So a link is
// resolved first, as an editor writes through it, and an existing file keeps its mode and owner.
func (t *toolbox) write(ctx context.Context, p string, content []byte) (replaced bool, err error) {
	target, mode, owner := p, fs.FileMode(0o644), ""
	out, ok, err := t.runProgram(ctx, "readlink", "-f", "--", p)
	if err != nil {
		return false, err
	}
	if name := strings.TrimSuffix(string(out), "\n"); ok && strings.HasPrefix(name, "/") {
		target = name
	}
	if out, ok, err = t.runProgram(ctx, "stat", "-c", "%a %u:%g", "--", target); err != nil {
		return false, err
	}
	if ok {
		replaced = true
		text, ids, _ := strings.Cut(strings.TrimSpace(string(out)), " ")
		if bits, parseErr := strconv.ParseUint(text, 8, 32); parseErr == nil && ids != "" {
			mode, owner = fs.FileMode(bits).Perm(), ids
		}
	}
	if err := t.sandbox.WriteFile(ctx, target, bytes.NewReader(content), mode, owner); err != nil {
		return false, t.writeRefused(p, err)
	}
	return replaced, nil
}

// writeRefused is refused for writes, whose "not found" usually concerns the path. If the sandbox
// is gone, the next exec reports it.
func (t *toolbox) writeRefused(p string, err error) error {
	if hasCode(err, api.CodeNotFound) || hasCode(err, api.CodeConflict) {
		return toolErrorf("Error: cannot write %s: %v", p, err)
	}
	return t.refused("write "+p, err)
}
