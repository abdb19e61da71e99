package interpreter

var r = &Language{
	Name: "r", Aliases: []string{"rscript"}, File: "main.R", Extensions: []string{".R", ".r"}, Image: "polyglot", Contexts: true,
	Toolchains: []Toolchain{{Run: []string{"Rscript", dir + "/main.R"}}},
	Libraries:  cran,
	Failure: (&report{
		head: pattern(`^(?P<name>Error)(?: in .*?)?\s?:(?: (?P<value>.*))?$`), with: "\nExecution halted", until: []string{"Calls: ", "Execution halted"},
	}).find,
}

// A package that cannot be installed is only a warning to R. Names are arguments, not part of the
// program.
var cran = &Libraries{
	Manager: "cran", Check: checkNamed(".", "", ""),
	Ways: func(names []string, local *Local) [][]Step {
		const fromRepository = `options(warn = 2); install.packages(commandArgs(TRUE), repos = Sys.getenv("R_REPO", "https://cloud.r-project.org"), quiet = TRUE)`
		const fromFiles = `options(warn = 2); install.packages(commandArgs(TRUE), repos = NULL, type = "source", quiet = TRUE)`
		if local == nil {
			return [][]Step{{{Argv: concat([]string{"Rscript", "-e", fromRepository}, names)}}}
		}
		argv := []string{"Rscript", "-e", fromFiles}
		for _, n := range names {
			argv = append(argv, local.find(n, "", "_", ".tar.gz"))
		}
		return [][]Step{{{Argv: argv}}}
	},
}
