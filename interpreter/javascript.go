package interpreter

import "strings"

// Imports of libraries are found from the source's directory upwards, so that the working
// directory's node_modules is linked there.
var javascript = &Language{
	Name: "javascript", Aliases: []string{"js", "node", "nodejs"}, File: "main.js", Extensions: []string{".js", ".mjs", ".cjs"}, Contexts: true, Image: "polyglot",
	Toolchains: []Toolchain{{Run: []string{"node", dir + "/main.js"}}},
	Links:      map[string]string{"node_modules": cwd + "/node_modules"},
	Libraries:  npm,
	Failure:    nodeFailure,
}

var npm = &Libraries{
	Manager: "npm", Check: checkNPM,
	Ways: func(names []string, local *Local) [][]Step {
		argv := []string{"npm", "install", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"}
		if local == nil {
			return [][]Step{{{Argv: concat(argv, []string{"--"}, names)}}}
		}
		argv = append(argv, "--offline", "--")
		for _, n := range names {
			scope := ""
			if scoped, ok := strings.CutPrefix(n, "@"); ok {
				scope, n, _ = strings.Cut(scoped, "/")
				scope += "-"
			}
			name, version, _ := strings.Cut(n, "@")
			argv = append(argv, local.find(scope+name, version, "-", ".tgz"))
		}
		return [][]Step{{{Argv: argv}}}
	},
}

// nodeFailure reads the report of an uncaught error, which ends with node's version.
var nodeFailure = (&report{
	head: pattern(`^(?:Uncaught:?\s+)?(?P<name>(?:[A-Za-z_$][\w$]*)?(?:Error|Exception))(?: \[[A-Z0-9_]+\])?(?:: (?P<value>.*))?$`),
	with: "\nNode.js v", until: []string{"    at ", "Node.js v", "{"},
}).find
