package interpreter

import "github.com/sandboxd/sandboxd/api"

// Java runs the file as a program of one source (JEP 330), which compiles it in memory.
var java = &Language{
	Name: "java", File: "Main.java", Extensions: []string{".java"}, Image: "polyglot",
	Toolchains: []Toolchain{{Run: []string{"java", dir + "/Main.java"}}},
	Failure: func(stderr string) *api.CodeFailure {
		if f := javaException(stderr); f != nil {
			return f
		}
		if javaCompiler().MatchString(stderr) {
			return compileError(stderr)
		}
		return nil
	},
}

var (
	javaException = (&report{
		head: pattern(`^Exception in thread "[^"]*" (?P<name>[\w.$]+)(?:: (?P<value>.*))?$`), with: "\n\tat ", until: []string{"\tat "},
	}).find
	javaCompiler = pattern(`(?m)^error: compilation failed$`)
)
