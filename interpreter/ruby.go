package interpreter

import (
	"strings"

	"github.com/sandboxd/sandboxd/api"
)

// Ruby holds output to a pipe back. A file that it reads before the source changes that, so that
// output comes as it is printed.
var ruby = &Language{
	Name: "ruby", Aliases: []string{"rb"}, File: "main.rb", Extensions: []string{".rb"}, Image: "polyglot", Contexts: true,
	Toolchains: []Toolchain{{Run: []string{"ruby", "-r" + dir + "/sync.rb", dir + "/main.rb"}}},
	Files:      map[string]string{"sync.rb": "$stdout.sync = true\n"},
	Libraries:  gem,
	Failure:    rubyFailure,
}

var (
	rubyError = &report{
		head: pattern(`main\.rb:\d+:\s?(?:in .*?: )?(?P<value>.*) \((?P<name>[A-Z][\w:]*)\)$`), first: true,
	}
	rubySyntax = &report{head: pattern(`main\.rb:\d+: (?P<value>syntax error, .*)$`), first: true}
)

// rubyFailure reads the report of an exception. Before Ruby 3.3 that of a syntax error lacks its
// name.
func rubyFailure(stderr string) *api.CodeFailure {
	f := rubyError.find(stderr)
	if f == nil {
		if f = rubySyntax.find(stderr); f != nil {
			f.Name = "SyntaxError"
		}
	}
	return f
}

var gem = &Libraries{
	Manager: "gem", Check: checkNamed("._-", ":", ".-"),
	// Behind "--" come flags of extensions' builds.
	Ways: func(names []string, local *Local) [][]Step {
		argv := []string{"gem", "install", "--no-document"}
		if local == nil {
			return [][]Step{{{Argv: concat(argv, names)}}}
		}
		argv = append(argv, "--local")
		for _, n := range names {
			name, version, _ := strings.Cut(n, ":")
			argv = append(argv, local.find(name, version, "-", ".gem"))
		}
		return [][]Step{{{Argv: argv}}}
	},
}
