package codepolicy

import (
	"cmp"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/api"
)

// maxFound is the maximum length in bytes of the text that a finding repeats.
const maxFound = 80

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

// Check returns the findings of all policies, by line, and whether one of the policies refuses the
// code. Of each pattern and of each module that a policy names, the first place counts.
func Check(policies []*Policy, code *Code) (found []api.CodeFinding, refused bool) {
	if len(policies) == 0 {
		return nil, false
	}
	plain := withoutComments(code.Language, code.Text)
	imports := slices.Concat(imports(code), code.Imports, libraries(code.Libraries))
	slices.SortStableFunc(imports, func(a, b Import) int { return cmp.Compare(a.Line, b.Line) })
	for _, p := range policies {
		for _, f := range p.check(code.Language, plain, imports) {
			f.Refused = f.Severity.Rank() >= p.refuse.Rank()
			refused = refused || f.Refused
			at := slices.IndexFunc(found, func(g api.CodeFinding) bool { return g.Kind == f.Kind && g.Name == f.Name && g.Line == f.Line })
			switch {
			case at < 0:
				found = append(found, f)
			case f.Refused && !found[at].Refused:
				found[at] = f
			}
		}
	}
	slices.SortStableFunc(found, func(a, b api.CodeFinding) int { return cmp.Compare(a.Line, b.Line) })
	return found, refused
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
	for i := range p.modules {
		r := &p.modules[i]
		for _, name := range r.names {
			at := slices.IndexFunc(imports, func(im Import) bool { return r.covers(cmp.Or(im.Language, language)) && within(im.Name, name) })
			if at >= 0 {
				found = append(found, api.CodeFinding{
					Kind: api.FindingModule, Name: name, Found: clip(imports[at].Name), Line: imports[at].Line, Severity: r.severity, Reason: r.reason,
				})
			}
		}
	}
	return found
}

// within reports whether an imported name is that of a module, or of a part of it.
func within(name, module string) bool {
	if all, ok := strings.CutSuffix(name, ".*"); ok && strings.HasPrefix(module, all+".") {
		return true
	}
	rest, ok := strings.CutPrefix(name, module)
	return ok && (rest == "" || strings.ContainsRune("./:", rune(rest[0])) || strings.HasSuffix(module, "/"))
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
