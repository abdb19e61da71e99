package policy

import (
	"slices"
	"strings"
	"testing"
)

// fragments are the parts of the lines that FuzzShell makes: ^S stands for a statement, ^W for a
// word, ^A for an arithmetic expression, ^N for the name of a variable. All programs that a line
// can name are canaries.
var fragments = map[byte][]string{
	'S': {
		"alpha", "beta ^W", "echo ^W", "^N=^W", "^N+=^W", "^N[^A]=^W", "^N=(^W ^W)", "^N+=([^A]=^W)", "((^A))", "((^N = ^A))", "let '^A'",
		"let ^N=^A", ": $((^A))", ": $[^A]", ": ${^N:=^W}", ": \"${^N:-^W}\"", "^S; ^S", "^S && ^S", "^S || ^S", "^S | ^S", "{ ^S; }", "(^S)",
		"if ^S; then ^S; else ^S; fi", "for ^N in ^W ^W; do ^S; done", "for ((^N=0;^N<2;^N++)); do ^S; break; done", "case ^W in ^W) ^S;; *) ^S;; esac",
		"f() { ^S; }; f ^W", "f() { local ^N=^W; ^S; }; f ^W", "[[ ^W -eq ^A ]]", "[[ ^A -lt 1 || ^W == ^W ]]", "[[ -v ^W ]]", "[ ^W = ^W ]",
		"[ ^W ]", "[ ^W ^W ]", "test ^W ^W ^W", "[ ! ^W ]", "printf ^W ^W", "printf -v ^W ^W", "printf -- ^W ^W", "read ^N <<< ^W", "read ^W <<< ^W",
		"read -a ^N <<< ^W", "read -a^N <<< ^W", "mapfile ^N <<< ^W", "mapfile ^W <<< ^W", "unset ^W", "unset ^N", "declare ^N=^W", "declare ^W",
		"declare -a ^N=^W", "declare -A ^N", "declare -A ^N=([^W]=^W)", "declare -i ^N=^W", "declare -n ^N=^W", "declare ^W ^N=^W", "export ^N=^W",
		"readonly ^W", "typeset -a ^N; typeset ^N=^W", "eval ^W", "eval '^S'", "trap ^W EXIT", "trap '^S' EXIT", "/bin/bash -c ^W", "/bin/bash -c '^S'",
		"/bin/sh -c \"^S\"", "/bin/bash -c \"^S\" ^W", "set -- ^W ^W", "set ^W", "shift", ": <<E\n^W\n$((^A))\nE\n", ": <<'E'\n^W\nE\n", ": < <(^S)",
		"^N=$(^S)", "^N=`^S`", "^N=\"$(^S)\"", "^W ^W", "$^N ^W", "command ^W ^W", "command ^S", "\\^S", "time ^S", "! ^S", "{^N}>f ^S", "exec {^N[^A]}>f",
		"exec ^W", "getopts ^W ^N ^W", "wait ^W", "^N=^W alpha", "^N=^W eval '^S'", "^N=^W /bin/bash -c '^S'", "PS4=^W; set -x; :", "RANDOM=^W", "OPTIND=^W",
		"SECONDS=^W", "^N() { ^S; }; ^N", "alpha() { ^S; }; alpha", "alpha() { :; }; unset -f alpha; ^S", "(alpha() { :; }); ^S",
		"declare -A m; m[^W]=^W; : ${m[^W]}", "declare -A m; : $((m[^A]))", ": <<E\n^W\\\nE\nE\n^S",
		": <<E\nE\\\n\n^S\nE\n", ": <<-E\n\t${^N:-\nE\n^S\n}\n\tE\n", ": <<\"E\\$\"\n^W\nE$\n^S\nE\\$\n", "^N=$(: <<E\nE ^S)\nE\n)",
		": <<A <<'B'\n^W\nA\n^W\nB\n", ": <<E; ^S\n^W\nE\n", "time -- ^S", "time -p ^S", "alpha() { :; } | ^S; alpha", "alpha() { ^S; } && ^S; alpha",
		"alpha() { ^S; } & alpha", "declare -A m; f() { : ${m[^W]}; }; m=^W f", "declare -A m; f() { ^S; }; ^N=^W f",
		"declare -A m; alpha() { : ${m[^W]}; }; export -f alpha; /bin/bash -c alpha", "set -a; ^S", ": < ^W", "echo x\r#^W; ^S",
		"../bin/alpha() { ^S; }; ../bin/alpha", "n=$(seq ^W ^W); : $((n))", "^N=1; ^S; : $((^N))", "^N=$(wc -l); : $((^N))", "wc() { echo ^W; }; ^S",
		"^S # comment ^W\n^S", "shopt -s extglob\n^S", "!(^S)", "coproc { ^S; }", "echo $'^W'", "echo $\"^W\"", "^N=1; ^N=^W; : $((^N))",
		"for ^N in ^W; do : $((^N)); done", "^N=^W; ^N=$^N; : ${b[^N]}", "export ^N=^W; /bin/bash -c ': $((^N))'",
	},
	'W': {
		"x", "1", "'a[$(gamma)]'", "'$(gamma)'", "'($(gamma))'", "gamma", "-v", "-va", "'-v a[$(gamma)]'", "$^N", "\"$^N\"", "${^N}", "\"${^N}\"",
		"${^N[^A]}", "\"${^N[@]}\"", "${^N[*]}", "${!^N}", "${!^N[@]}", "${^N@P}", "${^N@Q}", "${^N:^A}", "${^N:^A:^A}", "${#^N}", "${#^N[^A]}",
		"${^N:-^W}", "\"${^N:-^W}\"", "${^N:=^W}", "${^N+^W}", "${^N/^W/^W}", "${^N#^W}", "${^N%^W}", "$((^A))", "$[^A]", "$(^S)", "\"$(^S)\"", "`^S`",
		"<(^S)", "\"x$^N\"", "'x'$^N", "^N=^W", "\"^N=$^N\"", "a[^A]", "'a[^N]'", "\"a[$^N]\"", "*", "$1", "\"$1\"", "\"$*\"", "\"$@\"", "$#", "$?", "$_",
		"{^W,^W}", "{1..3}", "\"'$(gamma)'\"", "\"${^N:-'$(gamma)'}\"", "\"${^N:-'}\"", "$'x'", "\\$\\(gamma\\)", "\"\\$(gamma)\"", "\"\\'\"", "'^S'",
		"\"^S\"", "f", "~", "-i", "-a", "-n", "--", "=", "b", "a", "\"\\\"\"", "\\\"", "\\'", "\"`^S`\"", "]", "\"]\"", "-v'a[$(gamma)]'",
	},
	'A': {
		"0", "1", "^N", "^N", "$^N", "${^N}", "^N[^A]", "${^N[^A]}", "^A + ^A", "^A * ^A", "(^A)", "-^A", "!^A", "^N = ^A", "^N += ^A", "^N++", "--^N",
		"^A ? ^A : ^A", "^A, ^A", "^A && ^A", "${#^N}", "$#", "$?", "$((^A))", "$(^S)", "`^S`", "\"^N\"", "x$^N", "10#$^N", "0x1f", "'^N'", "${^N:-^A}", "$1",
		"_", "RANDOM", "m[^N]", "m[x]", "^N[@]", "^N[*]", "$^N$^N",
	},
	'N': {"a", "b", "x", "y", "m", "i", "_", "REPLY"},
}

// compose makes a line: each byte of choices selects a fragment.
func compose(choices []byte) string {
	var b strings.Builder
	var expand func(kind byte, depth int)
	expand = func(kind byte, depth int) {
		list, choice := fragments[kind], 0
		if len(choices) > 0 && depth <= 6 {
			choice, choices = int(choices[0]), choices[1:]
		}
		text := list[choice%len(list)]
		for i := 0; i < len(text); i++ {
			if text[i] == '^' {
				i++
				expand(text[i], depth+1)
			} else {
				b.WriteByte(text[i])
			}
		}
	}
	expand('S', 0)
	for len(choices) > 0 && b.Len() < 400 {
		b.WriteString("; ")
		expand('S', 0)
	}
	return b.String()
}

// FuzzShell compares the programs that bash and dash run with those that the facts name. A line
// that runs another one has to be opaque.
func FuzzShell(f *testing.F) {
	for i := range fragments['S'] {
		f.Add([]byte{byte(i)})
		f.Add([]byte{3, 2, byte(2 + i%3), byte(i), 4, 5, byte(i), 3})
	}
	shells := realShells(f, "alpha", "beta", "gamma")
	f.Fuzz(func(t *testing.T, choices []byte) {
		if len(choices) > 40 {
			return
		}
		compare(t, shells, compose(choices))
	})
}

// compare runs a line in the shells unless it is opaque.
func compare(t *testing.T, shells []realShell, line string) {
	t.Helper()
	f := shell(line)
	if f.Evaluates && !f.Opaque {
		t.Fatalf("%q evaluates, and is not opaque", line)
	}
	if f.Opaque {
		return
	}
	for _, s := range shells {
		if strings.HasSuffix(s.path, "dash") && !SameInSh(line) {
			continue
		}
		for _, name := range s.run(t, line) {
			if !slices.Contains(f.Programs, name) {
				t.Errorf("%s -c %q runs %s, and the facts are %q", s.path, line, name, f.Programs)
			}
		}
	}
}
