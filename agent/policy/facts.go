package policy

import (
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"

	"mvdan.cc/sh/v3/syntax"
)

// Facts holds the variables of a rule's condition. A field's comment begins with the name of its
// variable.
type Facts struct {
	Tool      string         // tool
	Arguments map[string]any // arguments: as parsed by the tool, not the model's text
	Command   string         // command: a shell line; "" for other tools

	Words []string // words: the line's literal words
	// programs: base names of the programs that the line names. If a program is named with a
	// directory other than the system's, such as ./ls, that name is listed as well.
	Programs []string
	Opaque   bool // opaque: the line runs code that cannot be determined from its text, or cannot be parsed
	// evaluates: the shell evaluates data as code or as arithmetic, in which a subscript of a
	// variable's value runs commands. It implies opaque.
	Evaluates bool
	Paths     []string // paths: absolute names in the call; relative ones are resolved against the working directory
	Writes    []string // writes: files that the call visibly writes to
	Hosts     []string // hosts: of URLs, user@host, IPv4 addresses and /dev/tcp, in lower case and without port

	WorkingDir, InputDir, OutputDir string // working_dir, input_dir, output_dir

	Turn    int                // turn: from 1
	Repeats int                // repeats: earlier identical calls of the run
	Spent   map[string]float64 // spent: turns, tokens, cost (dollars), seconds, cpu_seconds
	Budget  map[string]float64 // budget: ceilings under the same names; 0 if there is none
	Count   map[string]int     // count: calls, denied, failed, and the calls of each tool by its name
}

func (f Facts) variables() map[string]any {
	return map[string]any{
		"tool": f.Tool, "arguments": orEmpty(f.Arguments), "command": f.Command,
		"words": list(f.Words), "programs": list(f.Programs), "opaque": f.Opaque, "evaluates": f.Evaluates, "paths": list(f.Paths), "writes": list(f.Writes), "hosts": list(f.Hosts),
		"working_dir": f.WorkingDir, "input_dir": f.InputDir, "output_dir": f.OutputDir,
		"turn": f.Turn, "repeats": f.Repeats, "spent": orEmpty(f.Spent), "budget": orEmpty(f.Budget), "count": orEmpty(f.Count),
	}
}

func list(l []string) []string {
	if l == nil {
		return []string{}
	}
	return l
}

func orEmpty[V any](m map[string]V) map[string]V {
	if m == nil {
		return map[string]V{}
	}
	return m
}

// Shell parses a command line of bash and fills in its words, programs, paths, writes, hosts,
// opaque and evaluates.
func (f *Facts) Shell(line string) {
	f.Command = line
	r := newReader(f)
	r.line(line, 0, syntax.LangBash)
	r.settle()
	f.Hosts = append(f.Hosts, hosts(line)...)
	for _, l := range []*[]string{&f.Words, &f.Programs, &f.Paths, &f.Writes, &f.Hosts} {
		slices.Sort(*l)
		*l = slices.Compact(*l)
	}
}

// File adds a file that the tool reads or, if written is set, writes.
func (f *Facts) File(name string, written bool) {
	names := resolve(path.Clean("/"+f.WorkingDir), []string{name})
	f.Paths = append(f.Paths, names...)
	if written {
		f.Writes = append(f.Writes, names...)
	}
}

// hostPatterns match hosts in any text: URLs, IP addresses, user@host, bash's /dev/tcp.
var hostPatterns = sync.OnceValue(func() []*regexp.Regexp {
	return []*regexp.Regexp{
		regexp.MustCompile(`(?i)[a-z][a-z0-9+.-]*://(?:[^/@\s"'` + "`" + `]*@)?(\[[0-9a-f:.]+\]|[^/:?#\s"'` + "`" + `\\)]+)`),
		regexp.MustCompile(`(?i)/dev/(?:tcp|udp)/([^/\s"']+)/`),
		regexp.MustCompile(`\b(\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3})\b`),
		regexp.MustCompile(`(?i)(?:^|[\s"'=])[a-z0-9._-]+@([a-z0-9-]+(?:\.[a-z0-9-]+)+)`),
	}
})

// hosts returns the hosts that a text mentions.
func hosts(text string) []string {
	if len(text) > maxLine {
		text = text[:maxLine]
	}
	var found []string
	for _, re := range hostPatterns() {
		for _, m := range re.FindAllStringSubmatch(text, 1000) {
			found = append(found, strings.ToLower(strings.Trim(m[1], "[].")))
		}
	}
	return found
}
