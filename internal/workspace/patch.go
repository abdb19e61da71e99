package workspace

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"strings"

	"github.com/sandboxd/sandboxd/api"
)

const (
	maxText      = 4 << 20 // bytes of a file that is compared by lines
	maxEdits     = 2000    // lines that are found out one by one; beyond, a file is shown as replaced
	contextLines = 3       // lines around a change
)

// WritePatch writes the items in git's format of patches, which git apply reads. For a terminal,
// show is applied to every line, and of a binary file the patch only says that it differs.
func (p *Plan) WritePatch(w io.Writer, items []*Item, show func(string) string) error {
	out := bufio.NewWriter(w)
	for _, item := range items {
		if err := p.patch(out, item, show); err != nil {
			return err
		}
	}
	return out.Flush()
}

func (p *Plan) patch(out *bufio.Writer, item *Item, show func(string) string) error {
	e, was := item.e, &item.was
	if was.kind == directory && (e == nil || e.kind != directory) { // each file below is one of the patch
		names, err := p.to.list(item.Path)
		if err != nil {
			return err
		}
		for _, base := range names {
			name := item.Path + "/" + base
			if p.hidden.set[name] {
				continue
			}
			st, err := p.to.stat(name)
			if err != nil {
				return err
			}
			if err := p.patch(out, &Item{Path: name, Kind: api.Deleted, was: st}, show); err != nil {
				return err
			}
		}
		if e == nil || e.kind == none {
			return nil
		}
		was = new(state)
	}
	if e != nil && (e.kind == directory || e.kind == special) || (e == nil || e.kind == none) && (was.kind == special || was.kind == none) {
		return nil // git knows no directories
	}
	if was.kind == special || was.kind == directory {
		was = new(state)
	}
	oldKind, newKind := was.kind, none
	if e != nil {
		newKind = e.kind
	}
	if oldKind != none && newKind != none && oldKind != newKind { // a file became a link: two steps for git
		if err := p.hunks(out, item.Path, oldKind, none, was, nil, show); err != nil {
			return err
		}
		oldKind, was = none, new(state)
	}
	return p.hunks(out, item.Path, oldKind, newKind, was, e, show)
}

func gitMode(k kind, mode uint32) string {
	switch {
	case k == link:
		return "120000"
	case mode&0o100 != 0:
		return "100755"
	}
	return "100644"
}

func (p *Plan) hunks(out *bufio.Writer, name string, oldKind, newKind kind, was *state, e *entry, show func(string) string) error {
	a, b := Quote("a/"+name), Quote("b/"+name)
	fmt.Fprintf(out, "diff --git %s %s\n", a, b)
	var oldMode, newMode string
	if oldKind != none {
		oldMode = gitMode(oldKind, uint32(was.mode))
	}
	if newKind != none {
		newMode = gitMode(newKind, uint32(e.mode))
	}
	switch {
	case oldKind == none:
		fmt.Fprintf(out, "new file mode %s\n", newMode)
		a = "/dev/null"
	case newKind == none:
		fmt.Fprintf(out, "deleted file mode %s\n", oldMode)
		b = "/dev/null"
	case oldMode != newMode:
		fmt.Fprintf(out, "old mode %s\nnew mode %s\n", oldMode, newMode)
	}
	before, okBefore, err := p.hostText(name, oldKind, was)
	if err != nil {
		return err
	}
	after, okAfter, err := p.setText(newKind, e)
	if err != nil {
		return err
	}
	if (!okBefore || !okAfter) && show == nil {
		blob, err := p.hostBlob(name, oldKind, was)
		if err == nil {
			return p.binary(out, blob, oldMode, newMode, e)
		}
		// What cannot be read is said to differ, and git apply complains.
	}
	if !okBefore || !okAfter {
		fmt.Fprintf(out, "Binary files %s and %s differ\n", a, b)
		return nil
	}
	if bytes.Equal(before, after) {
		return nil
	}
	fmt.Fprintf(out, "--- %s\n+++ %s\n", a, b)
	unified(out, lines(before), lines(after), show)
	return nil
}

// hostText returns a file's content on the host, or a link's target; ok is false for one that is no
// text, too large or unreadable.
func (p *Plan) hostText(name string, k kind, was *state) (_ []byte, ok bool, err error) {
	switch {
	case k == none:
		return nil, true, nil
	case k == link:
		target, err := p.to.readlink(name)
		return []byte(target), err == nil, nil
	case was.size > maxText:
		return nil, false, nil
	}
	f, err := p.to.read(name)
	if err != nil {
		return nil, false, nil
	}
	defer f.Close() // only read
	return text(f)
}

func (p *Plan) setText(k kind, e *entry) (_ []byte, ok bool, err error) {
	switch {
	case k == none:
		return nil, true, nil
	case k == link:
		return []byte(e.target), true, nil
	case e.size > maxText:
		return nil, false, nil
	}
	return text(p.set.content(e))
}

func text(r io.Reader) (_ []byte, ok bool, err error) {
	data, err := io.ReadAll(io.LimitReader(r, maxText+1))
	if err != nil {
		return nil, false, fmt.Errorf("read content: %w", err)
	}
	return data, len(data) <= maxText && bytes.IndexByte(data, 0) < 0, nil
}

// lines cuts a text after each newline.
func lines(data []byte) []string {
	if len(data) == 0 {
		return nil
	}
	all := strings.SplitAfter(string(data), "\n")
	if all[len(all)-1] == "" {
		all = all[:len(all)-1]
	}
	return all
}

// edit is a stretch of lines that one side has and the other has not.
type edit struct{ a0, a1, b0, b1 int }

// edits returns the differences of two texts, in order.
func edits(a, b []string) []edit {
	head := 0
	for head < len(a) && head < len(b) && a[head] == b[head] {
		head++
	}
	tail := 0
	for tail < len(a)-head && tail < len(b)-head && a[len(a)-1-tail] == b[len(b)-1-tail] {
		tail++
	}
	inner := shortest(a[head:len(a)-tail], b[head:len(b)-tail])
	for i := range inner {
		e := &inner[i]
		e.a0, e.a1, e.b0, e.b1 = e.a0+head, e.a1+head, e.b0+head, e.b1+head
	}
	return inner
}

// shortest is Myers' greedy algorithm ("An O(ND) Difference Algorithm and Its Variations", 1986).
func shortest(a, b []string) []edit {
	n, m := len(a), len(b)
	if n == 0 && m == 0 {
		return nil
	}
	limit := min(n+m, maxEdits)
	v := make([]int, 2*limit+2)
	var trace [][]int
	for d := 0; d <= limit; d++ {
		trace = append(trace, append([]int(nil), v[limit-d:limit+d+1]...)) // of the step before, around diagonal 0
		for k := -d; k <= d; k += 2 {
			x := 0
			switch {
			case d == 0:
			case k == -d || k != d && v[limit+k-1] < v[limit+k+1]:
				x = v[limit+k+1]
			default:
				x = v[limit+k-1] + 1
			}
			for x < n && x-k < m && a[x] == b[x-k] {
				x++
			}
			v[limit+k] = x
			if x >= n && x-k >= m {
				return walkBack(trace, d, n, m)
			}
		}
	}
	return []edit{{0, n, 0, m}}
}

// walkBack turns the steps of the search into edits.
func walkBack(trace [][]int, d, x, y int) []edit {
	var out []edit
	for ; d > 0; d-- {
		v, k := trace[d], x-y
		at := func(k int) int { return v[k+d] }
		down := k == -d || k != d && at(k-1) < at(k+1)
		prev := k - 1
		if down {
			prev = k + 1
		}
		px := at(prev)
		py := px - prev
		e := edit{px, px, py, py}
		if down {
			e.b1++
		} else {
			e.a1++
		}
		if last := len(out) - 1; last >= 0 && out[last].a0 == e.a1 && out[last].b0 == e.b1 {
			out[last].a0, out[last].b0 = e.a0, e.b0
		} else {
			out = append(out, e)
		}
		x, y = px, py
	}
	for i, j := 0, len(out)-1; i < j; i, j = i+1, j-1 {
		out[i], out[j] = out[j], out[i]
	}
	return out
}

// unified writes the hunks of two texts.
func unified(out *bufio.Writer, a, b []string, show func(string) string) {
	all := edits(a, b)
	for len(all) > 0 {
		n := 1
		for n < len(all) && all[n].a0-all[n-1].a1 <= 2*contextLines {
			n++
		}
		group := all[:n]
		all = all[n:]
		first, last := group[0], group[n-1]
		lead, trail := min(contextLines, first.a0), min(contextLines, len(a)-last.a1)
		fmt.Fprintf(out, "@@ -%s +%s @@\n", span(first.a0-lead, last.a1+trail), span(first.b0-lead, last.b1+trail))
		at := first.a0 - lead
		for _, e := range group {
			for ; at < e.a0; at++ {
				line(out, ' ', a[at], show)
			}
			for ; at < e.a1; at++ {
				line(out, '-', a[at], show)
			}
			for i := e.b0; i < e.b1; i++ {
				line(out, '+', b[i], show)
			}
		}
		for end := at + trail; at < end; at++ {
			line(out, ' ', a[at], show)
		}
	}
}

func span(from, to int) string {
	switch to - from {
	case 0:
		return fmt.Sprintf("%d,0", from)
	case 1:
		return fmt.Sprint(from + 1)
	}
	return fmt.Sprintf("%d,%d", from+1, to-from)
}

func line(out *bufio.Writer, sign byte, text string, show func(string) string) {
	text, whole := strings.CutSuffix(text, "\n")
	_ = out.WriteByte(sign) // the writer keeps the first error
	if show != nil {
		text = show(text)
	}
	_, _ = out.WriteString(text) // as above
	_ = out.WriteByte('\n')      // as above
	if !whole {
		_, _ = out.WriteString("\\ No newline at end of file\n") // as above
	}
}
