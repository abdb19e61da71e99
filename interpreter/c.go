package interpreter

// Compilers run in the source's directory, so that their messages name it without a path.
var c = &Language{
	Name: "c", File: "main.c", Extensions: []string{".c"}, Image: "polyglot",
	Toolchains: []Toolchain{
		compiled("gcc", "main.c", "-lm"),
		compiled("cc", "main.c", "-lm"),
		compiled("clang", "main.c", "-lm"),
	},
	Libraries: apt,
}

var cpp = &Language{
	Name: "cpp", Aliases: []string{"c++", "cxx"}, File: "main.cpp", Extensions: []string{".cpp", ".cc", ".cxx"}, Image: "polyglot",
	Toolchains: []Toolchain{
		compiled("g++", "main.cpp", "-std=c++17"),
		compiled("c++", "main.cpp", "-std=c++17"),
		compiled("clang++", "main.cpp", "-std=c++17"),
	},
	Libraries: apt,
}

// compiled is the toolchain of a compiler that takes the flags of gcc.
func compiled(compiler, file string, flags ...string) Toolchain {
	return Toolchain{
		Compile: [][]string{concat([]string{compiler, "-o", "main", file, "-I" + cwd, "-pthread"}, flags)},
		Run:     []string{dir + "/main"},
	}
}
