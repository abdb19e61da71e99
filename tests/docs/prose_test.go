package docs

import (
	"regexp"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/tests/harness"
)

const (
	mostWords = 25 // of a sentence
	mostLines = 5  // of a paragraph
)

var (
	sentenceEnd = regexp.MustCompile(`[.!?:;]["')*]*(?:\s|$)`)
	linkTarget  = regexp.MustCompile(`\]\([^)]*\)`)
)

// prose returns the paragraphs and list items of a document, each with its number of lines. Tables,
// code and headings are left out.
func prose(text string) (paragraphs []string, lines []int) {
	current, count := "", 0
	flush := func() {
		if current != "" {
			paragraphs, lines = append(paragraphs, current), append(lines, count)
		}
		current, count = "", 0
	}
	item := regexp.MustCompile(`^(?:[-*]|\d+\.) `)
	for line := range strings.Lines(fence.ReplaceAllString(text, "")) {
		line = strings.TrimSpace(line)
		switch {
		case line == "", strings.HasPrefix(line, "|"), strings.HasPrefix(line, "#"), strings.HasPrefix(line, "<!--"):
			flush()
			continue
		case item.MatchString(line):
			flush()
		}
		current += line + " "
		count++
	}
	flush()
	return paragraphs, lines
}

// Documents for users are short: sentences of at most 25 words, paragraphs of at most five lines.
func TestDocumentsAreShort(t *testing.T) {
	root := harness.Root(t)
	names := append(shown(t, root), "CONTRIBUTING.md", "SPECIFICATION.md", "SECURITY.md", "ARCHITECTURE.md")
	for _, name := range names {
		if name == "docs/performance.md" { // written by benchmarks
			continue
		}
		paragraphs, lines := prose(document(t, root, name))
		for i, p := range paragraphs {
			if lines[i] > mostLines {
				t.Errorf("%s: a paragraph of %d lines: %.60s…", name, lines[i], p)
			}
			plain := linkTarget.ReplaceAllString(code.ReplaceAllString(p, "code"), "]")
			for _, s := range sentenceEnd.Split(plain, -1) {
				if n := len(strings.Fields(s)); n > mostWords {
					t.Errorf("%s: a sentence of %d words: %s", name, n, s)
				}
			}
		}
	}
}
