package interpreter

import (
	"strings"

	"github.com/sandboxd/sandboxd/api"
)

// Unbuffered (-u), so that output comes as it is printed, and is there when a timeout strikes.
var python = &Language{
	Name: "python", Aliases: []string{"python3", "py"}, File: "main.py", Extensions: []string{".py"}, Image: "python", Contexts: true,
	Toolchains: []Toolchain{
		{Run: []string{"python3", "-u", dir + "/main.py"}},
		{Run: []string{"python", "-u", dir + "/main.py"}},
	},
	Search:    "PYTHONPATH",
	Libraries: pip,
	Failure:   pythonFailure,
}

// Debian marks its Python as managed by apt (PEP 668). The sandbox is the environment that this
// protects elsewhere. The variable, unlike the flag, is no error to a pip before 23.0.1.
var pip = &Libraries{
	Manager: "pip", Check: checkPython,
	Ways: func(names []string, local *Local) [][]Step {
		var from []string
		if local != nil {
			from = []string{"--no-index", "--find-links", local.Dir}
		}
		return [][]Step{
			{{Argv: concat([]string{"uv", "pip", "install", "--system", "--break-system-packages", "--quiet"}, from, []string{"--"}, names)}},
			{{
				Argv: concat([]string{"python3", "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"}, from, []string{"--"}, names),
				Env:  []string{"PIP_BREAK_SYSTEM_PACKAGES=1", "PIP_ROOT_USER_ACTION=ignore"},
			}},
		}
	},
}

// pythonFailure reads the traceback at the end of stderr. A SyntaxError of the source itself has
// no header line.
func pythonFailure(stderr string) *api.CodeFailure {
	const header = "Traceback (most recent call last):\n"
	at := lastLine(stderr, header)
	if at < 0 {
		at = lastLine(stderr, "  File \"")
	}
	if at < 0 {
		return nil
	}
	trace := stderr[at:]
	// Frames are indented; the exception is the first line that is not.
	rest := strings.TrimPrefix(trace, header)
	for rest != "" && (rest[0] == ' ' || rest[0] == '\n') {
		_, rest, _ = strings.Cut(rest, "\n")
	}
	line, _, _ := strings.Cut(rest, "\n")
	name, _, found := strings.Cut(line, ":")
	if !isDotted(name) {
		return nil
	}
	value := ""
	if found {
		value = strings.TrimSpace(rest[len(name)+1:])
	}
	return &api.CodeFailure{Name: name, Value: value, Traceback: trace}
}
