package resident

import (
	"embed"
	"encoding/json"
	"fmt"
	"slices"
)

//go:embed bash.sh python.py python_charts.py python_display.py python_magic.py
var sources embed.FS

// A Kernel is the program of a context.
type Kernel struct {
	Language string
	Argv     []string
	Stdin    []byte // comes before the first request; nil if nothing does

	words  bool   // requests are words, and messages stand between output
	marker []byte // before each message
}

// NewSplitter returns the splitter for the output of the kernel's process.
func (k *Kernel) NewSplitter() Splitter {
	if k.words {
		return &marked{marker: k.marker}
	}
	return new(Decoder)
}

// SharesStderr reports whether the process's stderr has output of programs, and not the
// interpreter's own last words.
func (k *Kernel) SharesStderr() bool { return k.words }

// language is a kernel's source, and how the interpreter gets it.
type language struct {
	name    string
	aliases []string
	main    string            // file that the bootstrap executes
	parts   map[string]string // files that the kernel executes when it needs them, by their names there
	argv    func(size int) []string
	words   bool // the main file is an argument, behind argv, and the key another
}

var languages = []language{
	{
		name: "bash", aliases: []string{"sh", "shell"}, main: "bash.sh", words: true,
		argv: func(int) []string { return []string{"bash", "--noprofile", "--norc", "-c"} },
	},
	{
		name: "python", aliases: []string{"python3", "py"}, main: "python.py",
		parts: map[string]string{"display": "python_display.py", "magic": "python_magic.py", "charts": "python_charts.py"},
		argv: func(size int) []string {
			return []string{"python3", "-c", fmt.Sprintf(`import os
b = b""
while len(b) < %d:
    d = os.read(0, %d - len(b))
    if not d:
        raise SystemExit("no kernel on stdin")
    b += d
exec(compile(b, "<sandboxd>", "exec"), {"__name__": "sandboxd"})`, size, size)}
		},
	},
}

// Languages returns the names of the languages that have kernels.
func Languages() (names []string) {
	for _, l := range languages {
		names = append(names, l.name)
	}
	slices.Sort(names)
	return names
}

// For returns the kernel of a language, by its name or an alias; false if there is none. The key
// tells messages from output; each process has one of its own.
func For(name, key string) (Kernel, bool) {
	for _, l := range languages {
		if l.name == name || slices.Contains(l.aliases, name) {
			return l.kernel(key), true
		}
	}
	return Kernel{}, false
}

func (l *language) kernel(key string) Kernel {
	main := source(l.main)
	if l.words {
		return Kernel{Language: l.name, Argv: append(l.argv(len(main)), string(main), l.name, key), words: true, marker: []byte("\x00" + key + ":")}
	}
	parts := make(map[string]string, len(l.parts))
	for name, file := range l.parts {
		parts[name] = string(source(file))
	}
	line, err := json.Marshal(parts)
	if err != nil {
		panic(err) // strings
	}
	stdin := slices.Concat(main, line, []byte("\n"))
	return Kernel{Language: l.name, Argv: l.argv(len(main)), Stdin: stdin}
}

func source(file string) []byte {
	data, err := sources.ReadFile(file)
	if err != nil {
		panic(err) // the table names files that are embedded
	}
	return data
}
