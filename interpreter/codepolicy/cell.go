package codepolicy

import "strings"

// cell takes the magics out of the code of a Python context, and returns their imports. A shell
// escape imports subprocess, which runs it, and the programs that it names.
func cell(src string) (string, []Import) {
	var found []Import
	runs := func(script string, line int) {
		found = append(found, Import{Name: "subprocess", Line: line})
		found = append(found, commands(script, line)...)
	}
	if rest, ok := strings.CutPrefix(src, "%%"); ok {
		first, body, _ := strings.Cut(rest, "\n")
		name, _, _ := strings.Cut(strings.TrimSpace(first), " ")
		switch name {
		case "bash", "sh", "script", "system", "sx", "!":
			runs(body, 2)
			return "", found
		}
		src = "\n" + body // %%time and others run Python
	}
	if !strings.ContainsAny(src, "!%") {
		return src, found
	}
	lines := strings.Split(src, "\n")
	for i, line := range lines {
		before, what, rest := magic(line)
		switch what {
		case 0:
			continue
		case '!':
			runs(strings.TrimPrefix(rest, "!"), i+1)
		default:
			name, args, _ := strings.Cut(strings.TrimSpace(rest), " ")
			switch name {
			case "system", "sx", "sc", "pip", "conda", "ls", "cat", "mkdir", "rm", "cp", "mv", "run":
				script := args
				if name != "system" && name != "sx" && name != "sc" {
					script = name + " " + args
				}
				runs(script, i+1)
			case "load_ext", "reload_ext":
				found = append(found, Import{Name: strings.TrimSpace(args), Line: i + 1})
			case "time", "timeit", "prun", "memit": // a statement behind options
				for strings.HasPrefix(args, "-") {
					_, args, _ = strings.Cut(args, " ")
				}
				lines[i] = before + args
				continue
			}
		}
		lines[i] = before + "pass"
		if strings.TrimSpace(before) != "" {
			lines[i] = before + "None"
		}
	}
	return strings.Join(lines, "\n"), found
}

// magic splits a line that is a shell escape or a magic, with a possible assignment before it. In
// Python's own grammar no line begins so, but in a string of many lines one may.
func magic(line string) (before string, what byte, rest string) {
	at := strings.IndexAny(line, "!%")
	if at < 0 {
		return "", 0, ""
	}
	before = line[:at]
	if name := strings.TrimSpace(before); name != "" {
		if !strings.HasSuffix(name, "=") || strings.ContainsAny(name[:len(name)-1], `=("'[{#<>`) {
			return "", 0, ""
		}
	}
	return before, line[at], line[at+1:]
}
