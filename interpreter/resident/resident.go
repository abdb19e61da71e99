package resident

import (
	"cmp"
	"embed"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

//go:embed bash.sh javascript.js python.py python_charts.py python_display.py python_magic.py r.R ruby.rb
var sources embed.FS

// A Kernel is the program of a context.
type Kernel struct {
	Language string
	Program  string // interpreter that the image must have
	Argv     []string
	Stdin    []byte // comes before the first request; nil if nothing does
	Preloads bool   // it can import modules before it is ready
	// Begins reports whether the kernel says [KindBegan] in each run. A SIGINT that comes before that
	// is taken for one of an earlier run.
	Begins bool
	// Deaf reports whether the interpreter loses a SIGINT while it starts a program and begins to wait
	// for that. The signal is to be sent again.
	Deaf bool

	words  bool   // requests are words
	marker []byte // before each message between output; nil if output comes in frames
}

// NewSplitter returns the splitter for the output of the kernel's process.
func (k *Kernel) NewSplitter() Splitter {
	if k.marker != nil {
		return &marked{marker: k.marker}
	}
	return new(Decoder)
}

// SharesStderr reports whether the process's stderr has output of programs, and not the
// interpreter's own last words.
func (k *Kernel) SharesStderr() bool { return k.marker != nil }

// language is a kernel's source, and how the interpreter gets it.
type language struct {
	name    string
	main    string            // file that the bootstrap executes
	parts   map[string]string // files that the kernel executes when it needs them, by their names there
	program string
	argv    func(size int) []string
	marked  bool   // messages stand between output; the main file is an argument, the language and the key are others
	mark    string // before the key of a message; NUL by default
	onStdin bool   // the main file comes on stdin, behind the key
	words   bool   // requests are words
	begins  bool   // see [Kernel.Begins]
	deaf    bool   // see [Kernel.Deaf]
}

var languages = []language{
	{
		name: "bash", program: "bash", main: "bash.sh", marked: true, words: true, deaf: true,
		argv: func(int) []string { return []string{"bash", "--noprofile", "--norc", "-c"} },
	},
	{
		name: "javascript", program: "node", main: "javascript.js", marked: true, begins: true,
		argv: node,
	},
	{
		name: "python", program: "python3", main: "python.py",
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
	{
		name: "r", program: "Rscript", main: "r.R", marked: true, words: true, deaf: true, onStdin: true, mark: "\x01", // R writes no NUL
		// R cannot move its descriptors, and its arguments have at most 10,000 bytes.
		argv: func(size int) []string {
			return []string{"sh", "-c", `exec Rscript -e "$1" 3<&0 </dev/null`, "sh", fmt.Sprintf(
				`local({requests<-pipe("trap '' INT;exec cat <&3","rb");key<-readLines(requests,1L);`+
					`eval(parse(text=readChar(requests,%dL,TRUE),keep.source=FALSE))},new.env(parent=.BaseNamespaceEnv))`, size)}
		},
	},
	{
		name: "ruby", program: "ruby", main: "ruby.rb", marked: true,
		argv: func(int) []string { return []string{"ruby", "-e"} },
	},
	{
		name: "typescript", program: "node", main: "javascript.js", marked: true, begins: true, argv: node,
	},
}

// node runs a kernel. It cannot move its descriptors.
func node(int) []string {
	return []string{"sh", "-c", `exec node -e "$1" "$3" "$2" 3<&0 4>&1 5>&2 </dev/null`, "sh"}
}

// Languages returns the names of the languages that have kernels.
func Languages() (names []string) {
	for _, l := range languages {
		names = append(names, l.name)
	}
	slices.Sort(names)
	return names
}

// For returns the kernel of a language; false if there is none. The key
// tells messages from output; each process has one of its own. A kernel that can imports the
// modules of preload before it is ready.
func For(name, key string, preload ...string) (Kernel, bool) {
	for _, l := range languages {
		if l.name == name {
			return l.kernel(key, preload), true
		}
	}
	return Kernel{}, false
}

func (l *language) kernel(key string, preload []string) Kernel {
	main := source(l.main)
	if l.marked {
		k := Kernel{Language: l.name, Program: l.program, Argv: l.argv(len(main)), Begins: l.begins, Deaf: l.deaf, words: l.words, marker: []byte(cmp.Or(l.mark, "\x00") + key + ":")}
		if l.onStdin {
			k.Stdin = slices.Concat([]byte(key+"\n"), main)
		} else {
			k.Argv = append(k.Argv, string(main), l.name, key)
		}
		return k
	}
	parts := map[string]string{"preload": strings.Join(preload, " ")}
	for name, file := range l.parts {
		parts[name] = string(source(file))
	}
	line, err := json.Marshal(parts)
	if err != nil {
		panic(err) // strings
	}
	stdin := slices.Concat(main, line, []byte("\n"))
	return Kernel{Language: l.name, Program: l.program, Argv: l.argv(len(main)), Stdin: stdin, Preloads: true}
}

func source(file string) []byte {
	data, err := sources.ReadFile(file)
	if err != nil {
		panic(err) // the table names files that are embedded
	}
	return data
}
