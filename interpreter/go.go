package interpreter

var golang = &Language{
	Name: "go", Aliases: []string{"golang"}, File: "main.go", Extensions: []string{".go"}, Image: "polyglot",
	Toolchains: []Toolchain{
		goToolchain("go"),
		goToolchain("/usr/local/go/bin/go"), // where Go's own archives are unpacked, and images have it in no PATH
	},
	Libraries: goModules,
	Failure: (&report{
		head: pattern(`^(?P<name>panic|fatal error): (?P<value>.*)$`), first: true, with: "\ngoroutine ",
	}).find,
}

func goToolchain(program string) Toolchain {
	return Toolchain{
		Compile: [][]string{{program, "build", "-o", "main", "main.go"}},
		Run:     []string{dir + "/main"},
	}
}

// Every run is a module of its own; downloads stay in the module cache.
var goModules = &Libraries{
	Manager: "go", Check: checkGo,
	Ways: func(names []string, local *Local) [][]Step {
		env := []string{"GOTOOLCHAIN=local", "GOFLAGS=-mod=mod"}
		if local != nil {
			env = append(env, "GOPROXY=file://"+local.Dir, "GOSUMDB=off", "GOVCS=*:off")
		}
		var ways [][]Step
		for _, program := range []string{"go", "/usr/local/go/bin/go"} {
			ways = append(ways, []Step{
				{Argv: []string{program, "mod", "init", "main"}, Env: env, Private: true},
				{Argv: concat([]string{program, "get", "--"}, names), Env: env, Private: true},
			})
		}
		return ways
	},
}
