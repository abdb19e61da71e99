package codepolicy

import (
	"cmp"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/api"
)

// maxFound is the maximum length in bytes of the text that a finding repeats.
const maxFound = 80

// MaxFindings is the maximum number of findings that [Check] returns.
const MaxFindings = 1000

// Code is source text to be judged.
type Code struct {
	Language string // name of the language
	Text     string
	Cell     bool     // it runs in a context, where Python has magics
	Imports  []Import // that another reader of the same text has found
	// Libraries are names of packages, with versions, that are installed for the run.
	Libraries []string
}

// Cost is the bound of the steps of a check of code with this length.
func (p *Policy) Cost(length int) int { return p.program * length }

// Reads reports whether modules of this language are restricted.
func (p *Policy) Reads(language string) bool {
	return slices.ContainsFunc(p.modules, func(m module) bool { return m.covers(language) })
}

// Result is the outcome of [Check].
type Result struct {
	Findings []api.CodeFinding // by line; if there are too many, those that refuse come first
	More     int               // number of findings beyond [MaxFindings], which are left out
	Refused  bool              // one of the policies refuses the code
}

// Check judges code by all policies. Of each pattern and of each module that a policy names, the
// first place counts.
func Check(policies []*Policy, code *Code) (r Result) {
	if len(policies) == 0 {
		return r
	}
	plain := withoutComments(code.Language, code.Text)
	imports := slices.Concat(imports(code), code.Imports, libraries(code.Libraries))
	slices.SortStableFunc(imports, func(a, b Import) int { return cmp.Compare(a.Line, b.Line) })
	type place struct {
		kind api.FindingKind
		name string
		line int
	}
	known := make(map[place]int) // indexes in found
	var found []api.CodeFinding
	for _, p := range policies {
		for _, f := range p.check(code.Language, plain, imports) {
			f.Refused = f.Severity.Rank() >= p.refuse.Rank()
			r.Refused = r.Refused || f.Refused
			at, ok := known[place{f.Kind, f.Name, f.Line}]
			switch {
			case !ok:
				known[place{f.Kind, f.Name, f.Line}] = len(found)
				found = append(found, f)
			case f.Refused && !found[at].Refused:
				found[at] = f
			}
		}
	}
	if r.More = max(0, len(found)-MaxFindings); r.More > 0 {
		slices.SortStableFunc(found, func(a, b api.CodeFinding) int { return cmp.Compare(rank(&b), rank(&a)) })
		found = slices.Clip(found[:MaxFindings])
	}
	slices.SortStableFunc(found, func(a, b api.CodeFinding) int { return cmp.Compare(a.Line, b.Line) })
	r.Findings = found
	return r
}

// rank orders findings: those that refuse are above all others.
func rank(f *api.CodeFinding) int {
	if f.Refused {
		return 1
	}
	return 0
}

func (p *Policy) check(language, plain string, imports []Import) []api.CodeFinding {
	var found []api.CodeFinding
	for i := range p.patterns {
		r := &p.patterns[i]
		if !r.covers(language) {
			continue
		}
		if at := r.re.FindStringIndex(plain); at != nil {
			found = append(found, api.CodeFinding{
				Kind: api.FindingPattern, Name: r.text, Found: clip(plain[at[0]:at[1]]), Line: 1 + strings.Count(plain[:at[0]], "\n"),
				Severity: r.severity, Reason: r.reason,
			})
		}
	}
	first, n := p.firstImports(language, imports), -1
	for i := range p.modules {
		r := &p.modules[i]
		for _, name := range r.names {
			if n++; first[n] < len(imports) {
				im := &imports[first[n]]
				found = append(found, api.CodeFinding{
					Kind: api.FindingModule, Name: name, Found: clip(im.Name), Line: im.Line, Severity: r.severity, Reason: r.reason,
				})
			}
		}
	}
	return found
}

// firstImports returns, for each name of the modules in order, the index of the first import that
// the name covers, or the number of imports. Its steps are those of both lists added up, not
// multiplied: a request may bring a policy of 15,000 names.
func (p *Policy) firstImports(language string, imports []Import) []int {
	type key struct {
		language string
		name     string
		all      bool // the import of all that is in name
	}
	var first []int
	wanted := make(map[key][]int) // indexes in first
	languages := []string{language}
	for i := range imports {
		if l := imports[i].Language; l != "" && !slices.Contains(languages, l) {
			languages = append(languages, l)
		}
	}
	for i := range p.modules {
		r := &p.modules[i]
		for _, name := range r.names {
			for _, l := range languages {
				if !r.covers(l) {
					continue
				}
				wanted[key{l, name, false}] = append(wanted[key{l, name, false}], len(first))
				for at := range len(name) {
					if name[at] == '.' {
						wanted[key{l, name[:at], true}] = append(wanted[key{l, name[:at], true}], len(first))
					}
				}
			}
			first = append(first, len(imports))
		}
	}
	for i := range imports {
		name := imports[i].Name
		found := func(k key) {
			for _, n := range wanted[k] {
				first[n] = min(first[n], i)
			}
			delete(wanted, k) // later imports come too late
		}
		l := cmp.Or(imports[i].Language, language)
		found(key{l, name, false})
		if all, ok := strings.CutSuffix(name, ".*"); ok {
			found(key{l, all, true})
		}
		for at := range len(name) {
			switch name[at] {
			case '/':
				found(key{l, name[:at+1], false}) // a module that ends with /
				found(key{l, name[:at], false})
			case '.', ':':
				found(key{l, name[:at], false})
			}
		}
	}
	return first
}

// libraries returns the packages that a run installs, without their versions, as imports.
func libraries(names []string) []Import {
	var out []Import
	for _, name := range names {
		if at := strings.IndexAny(name[min(1, len(name)):], "@<>=!~:;[ "); at >= 0 {
			name = name[:at+1]
		}
		out = append(out, Import{Name: name})
	}
	return out
}

func clip(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) > maxFound {
		s = strings.ToValidUTF8(s[:maxFound], "") + "..."
	}
	return s
}
