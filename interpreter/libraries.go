package interpreter

import (
	"errors"
	"path"
	"slices"
	"strings"
)

// Libraries says how the package manager of a language installs libraries.
type Libraries struct {
	Manager string
	// Check refuses all but a name of this ecosystem, with a version at most. An accepted name
	// never begins with a dash, and is no path and no URL.
	Check func(name string) error
	// Ways returns the ways to install libraries with these names, best first: the programs of each
	// way one after the other. The first way whose programs the image has is used. With local the
	// packages of that directory are used, and no others.
	Ways func(names []string, local *Local) [][]Step
}

// A Step is one program that installs libraries.
type Step struct {
	Argv    []string
	Env     []string // in addition to the run's
	Private bool     // run in the private directory, not in the working directory
}

// Local is a directory of the sandbox that holds packages.
type Local struct {
	Dir   string
	Files []string // names of its files
}

var (
	errName    = errors.New("not a name of a library, with a version at most")
	errVersion = errors.New("not a version")
)

// maxName bounds a name with its version.
const maxName = 200

func concat(lists ...[]string) []string { return slices.Concat(lists...) }

// each reports whether s is not empty, has only letters, digits and the other characters, and
// begins with a letter or a digit.
func each(s, others string) bool {
	for i := range len(s) {
		c := s[i]
		alnum := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !alnum && (i == 0 || strings.IndexByte(others, c) < 0) {
			return false
		}
	}
	return s != "" && len(s) <= maxName
}

// checkPython accepts a name of PEP 508 with extras and version specifiers, such as
// "requests[socks]>=2.31,<3". URLs, markers and spaces are refused.
func checkPython(s string) error {
	end := strings.IndexAny(s, "<>=!~")
	name, versions := s, ""
	if end >= 0 {
		name, versions = s[:end], s[end:]
	}
	if base, extras, ok := strings.Cut(name, "["); ok {
		inner, closed := strings.CutSuffix(extras, "]")
		if !closed {
			return errName
		}
		for extra := range strings.SplitSeq(inner, ",") {
			if !each(extra, "._-") {
				return errName
			}
		}
		name = base
	}
	if !each(name, "._-") || len(s) > maxName {
		return errName
	}
	if versions == "" {
		return nil
	}
	for spec := range strings.SplitSeq(versions, ",") {
		op := 0
		for op < len(spec) && strings.IndexByte("<>=!~", spec[op]) >= 0 {
			op++
		}
		if !slices.Contains([]string{"<", "<=", ">", ">=", "==", "===", "!=", "~="}, spec[:op]) || !each(spec[op:], "._-+!*") {
			return errVersion
		}
	}
	return nil
}

// checkNPM accepts a package name with a scope at most, and behind @ a version, a range without
// spaces or a tag.
func checkNPM(s string) error {
	rest := s
	if scoped, ok := strings.CutPrefix(s, "@"); ok {
		scope, name, ok := strings.Cut(scoped, "/")
		if !ok || !each(scope, "._-") {
			return errName
		}
		rest = name
	}
	name, version, versioned := strings.Cut(rest, "@")
	if !each(name, "._-") || len(s) > maxName {
		return errName
	}
	if versioned && !each(strings.TrimLeft(version, "^~<>="), ".+-*") {
		return errVersion
	}
	return nil
}

// checkNamed returns a check of names of letters, digits and some other characters, with a version
// behind sep.
func checkNamed(others, sep, versionChars string) func(string) error {
	return func(s string) error {
		name, version, versioned := s, "", false
		if sep != "" {
			name, version, versioned = strings.Cut(s, sep)
		}
		if !each(name, others) || len(s) > maxName {
			return errName
		}
		if versioned && !each(version, versionChars) {
			return errVersion
		}
		return nil
	}
}

// checkGo accepts the path of a package whose first element is a host name, with a version behind
// @.
func checkGo(s string) error {
	name, version, versioned := strings.Cut(s, "@")
	host, _, ok := strings.Cut(name, "/")
	if !ok || !strings.Contains(host, ".") || len(s) > maxName {
		return errName
	}
	for part := range strings.SplitSeq(name, "/") {
		if !each(part, "._-~") {
			return errName
		}
	}
	if versioned && !each(version, ".-+") {
		return errVersion
	}
	return nil
}

// find returns the path of the file of the directory that holds a package: its name, sep, a version
// and the extension. Without a version the last one by name is taken. If there is none it returns
// the path that such a file would have, which the package manager then names.
func (l *Local) find(name, version, sep, ext string) string {
	var found string
	for _, f := range slices.Sorted(slices.Values(l.Files)) {
		base, isPackage := strings.CutSuffix(f, ext)
		v, ofName := strings.CutPrefix(base, name+sep)
		if isPackage && ofName && v != "" && v[0] >= '0' && v[0] <= '9' && (version == "" || v == version || strings.HasPrefix(v, version+sep)) {
			found = f
		}
	}
	if found == "" {
		found = name + sep + version + ext
	}
	return path.Join(l.Dir, found)
}

// apt installs Debian packages. In a sandbox with one id apt cannot become its own user.
var apt = &Libraries{
	Manager: "apt", Check: checkNamed("+.-", "=", ".+-~:"),
	Ways: func(names []string, local *Local) [][]Step {
		env := []string{"DEBIAN_FRONTEND=noninteractive"}
		get := []string{"apt-get", "-qq", "-o", "APT::Sandbox::User=root", "-o", "Dpkg::Use-Pty=0"}
		install := concat(get, []string{"install", "-y", "--no-install-recommends"})
		if local == nil {
			return [][]Step{{
				{Argv: concat(get, []string{"update"}), Env: env},
				{Argv: concat(install, []string{"--"}, names), Env: env},
			}}
		}
		var files []string
		for _, n := range names {
			name, version, _ := strings.Cut(n, "=")
			files = append(files, local.find(name, version, "_", ".deb"))
		}
		return [][]Step{{{Argv: concat(install, []string{"--no-download", "--"}, files), Env: env}}}
	},
}
