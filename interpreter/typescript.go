package interpreter

// Types are removed, not checked. Node does that itself from 22.18 and 23.6 on. Other programs keep
// the lines of the source, too.
var typescript = &Language{
	Name: "typescript", Aliases: []string{"ts"}, File: "main.ts", Extensions: []string{".ts", ".mts", ".cts"}, Image: "polyglot", Contexts: true,
	Toolchains: []Toolchain{
		{
			Probe: &Probe{Argv: []string{"node", "-p", "process.features.typescript"}, Want: []string{"strip", "transform"}},
			Run:   []string{"node", "--disable-warning=ExperimentalWarning", dir + "/main.ts"},
		},
		{
			Compile: [][]string{{"esbuild", "main.ts", "--outfile=main.js", "--sourcemap=inline", "--log-level=warning", "--color=false"}},
			Run:     []string{"node", "--enable-source-maps", dir + "/main.js"},
		},
		{Run: []string{"tsx", dir + "/main.ts"}},
		{Run: []string{"deno", "run", "--allow-all", "--quiet", dir + "/main.ts"}},
		{Run: []string{"bun", "run", dir + "/main.ts"}},
	},
	Links:     javascript.Links,
	Libraries: npm,
	Failure:   nodeFailure,
}
