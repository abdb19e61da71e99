package functional

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

const operatorsPolicy = `
version: 1
refuse: high
patterns:
- {pattern: 'touch', severity: low, reason: touches}
- {pattern: '\bos\.system\b', languages: python, severity: critical, reason: runs a shell}
modules:
- {module: [subprocess, encodings], languages: python, severity: high, reason: starts processes}
- {module: json, languages: python, severity: medium}
- {module: [nc, curl], languages: bash, severity: high}
- {module: child_process, languages: javascript, severity: high}
`

// found are findings in words, those that refuse with a !.
func found(list []api.CodeFinding) string {
	var words []string
	for _, f := range list {
		word := fmt.Sprintf("%d:%s", f.Line, f.Name)
		if f.Refused {
			word += "!"
		}
		words = append(words, word)
	}
	return strings.Join(words, " ")
}

// judged runs code, and returns the findings, and whether it was refused.
func judged(t *testing.T, d *harness.Daemon, s *harness.Sandbox, req api.CodeRequest) (findings string, refused bool) {
	t.Helper()
	res, err := d.Client(t).RunCode(t.Context(), s.ID, req)
	if p := (*api.Problem)(nil); errors.As(err, &p) && p.Code == api.CodeRefused {
		return found(p.Findings), true
	}
	if err != nil {
		t.Fatalf("run %q: %v", req.Code, err)
	}
	return found(res.Findings), false
}

// The operator's policy holds for every run, by itself and in a context, and a request can only add
// to it. Refused code leaves nothing, not even a start.
func TestCodePolicy(t *testing.T) {
	testenv.SameForAll(t)
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte(operatorsPolicy), 0o600); err != nil {
		t.Fatal(err)
	}
	d := harness.Start(t, harness.Options{Args: []string{"--code-policy", file}})
	s := d.Create(t, api.CreateSandbox{Name: "judged"})
	python, bash := newContext(t, d, s, api.CreateContext{}), newContext(t, d, s, api.CreateContext{Language: "bash"})
	for _, c := range []struct {
		name    string
		req     api.CodeRequest
		found   string
		refused bool
	}{
		{"nothing", api.CodeRequest{Code: "print(1)"}, "", false},
		{"a warning", api.CodeRequest{Code: "import json\nx = 'touch'"}, `1:json 2:touch`, false},
		{"a pattern", api.CodeRequest{Code: "import os\nos.system('touch /tmp/ran')"}, `2:touch 2:\bos\.system\b!`, true},
		{"a module", api.CodeRequest{Code: "\nimport subprocess"}, "2:subprocess!", true},
		{"a module that only Python's parser sees", api.CodeRequest{Code: "# coding: utf-7\n+AGkAbQBwAG8AcgB0ACAAcwB1AGIAcAByAG8AYwBlAHMAcw-\nopen('/tmp/ran', 'w')"}, "2:subprocess!", true},
		{"a syntax error", api.CodeRequest{Code: "import ("}, "", false},
		{"bash", api.CodeRequest{Language: "bash", Code: "touch /tmp/ran; echo $(nc -l)"}, "1:touch 1:nc!", true},
		{"javascript", api.CodeRequest{Language: "javascript", Code: "require('child_process')"}, "1:child_process!", true},
		{"check", api.CodeRequest{Code: "import json\nopen('/tmp/ran', 'w')", Check: true}, "1:json", false},
		{"a stricter request", api.CodeRequest{Code: "import json", Policy: "version: 1\nmodules: [{module: json}]"}, "1:json!", true},
		{"a preset", api.CodeRequest{Code: "import socket", Policy: "{version: 1, presets: [strict]}"}, "1:socket!", true},
		{"a laxer request", api.CodeRequest{Code: "import subprocess", Policy: "version: 1\nrefuse: critical\nmodules: [{module: subprocess, severity: low}]"}, "1:subprocess!", true},
		{"a library", api.CodeRequest{Code: "1", Libraries: []string{"subprocess==1"}}, "0:subprocess!", true},
		{"a context", api.CodeRequest{Context: python.ID, Code: "x = 1\nimport subprocess"}, "2:subprocess!", true},
		{"a context's warning", api.CodeRequest{Context: python.ID, Code: "import json"}, "1:json", false},
		{"a magic", api.CodeRequest{Context: python.ID, Code: "!echo > /tmp/ran"}, "1:subprocess!", true},
		{"a magic cell", api.CodeRequest{Context: python.ID, Code: "%%bash\necho > /tmp/ran"}, "1:subprocess!", true},
		{"a check in a context", api.CodeRequest{Context: python.ID, Code: "open('/tmp/ran', 'w')", Check: true}, "", false},
		{"a context of bash", api.CodeRequest{Context: bash.ID, Code: "touch /tmp/ran; 'cu'rl x"}, "1:touch 1:curl!", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got, refused := judged(t, d, s, c.req); got != c.found || refused != c.refused {
				t.Errorf("findings %q, refused %v; want %q, %v", got, refused, c.found, c.refused)
			}
		})
	}
	if got := s.Sh(t, "ls /tmp/ran 2>/dev/null || true"); got != "" {
		t.Error("refused code has run")
	}
	noCodeLeft(t, s)
	if got := inContext(t, d, python, "x"); got != "|NameError" {
		t.Errorf("after a refused run in a context: %q", got)
	}

	client := d.Client(t)
	_, err := client.RunCode(t.Context(), s.ID, api.CodeRequest{Code: "1", Policy: "version: 1\nrules: []"})
	wantProblem(t, err, api.CodeInvalid, "2:1: policy has no key")
	_, err = client.RunCode(t.Context(), s.ID, api.CodeRequest{Code: strings.Repeat("#", 1<<20), Policy: "version: 1\npatterns: [{pattern: '.{900}x'}]"})
	wantProblem(t, err, api.CodeTooLarge, "too large for code of 1048576 bytes")
	_, err = client.StreamCode(t.Context(), s.ID, api.CodeRequest{Code: "import subprocess"}, func(api.CodeEvent) error { return nil })
	wantProblem(t, err, api.CodeRefused, "line 1: module subprocess, high: starts processes")
	var started api.CodeEvent
	_, err = client.StreamCode(t.Context(), s.ID, api.CodeRequest{Code: "import json"}, func(e api.CodeEvent) error {
		if e.Type == api.CodeStarted {
			started = e
		}
		return nil
	})
	if err != nil || found(started.Findings) != "1:json" {
		t.Errorf("%+v, %v", started, err)
	}

	refused := d.CLI(t, "code", "--in", "judged", "--code", "import subprocess")
	if refused.Code != 126 || !strings.Contains(refused.Stderr, "line 1: module subprocess, high: starts processes") {
		t.Errorf("%+v", refused)
	}
	warned := d.CLI(t, "code", "--in", "judged", "--check", "--code-policy", "development", "--code", "import json")
	if warned.Code != 0 || warned.Stdout != "line 1: medium: module json\n" {
		t.Errorf("%+v", warned)
	}
	// Each judgement that is no plain consent is recorded, with the digest of the code.
	var recorded []string
	for line := range strings.Lines(d.CLI(t, "events", "--no-follow", "--json", "--filter", "type=code").Stdout) {
		var e api.Event
		if err := json.Unmarshal([]byte(line), &e); err != nil || !strings.HasPrefix(e.Object, "sha256:") || e.Sandbox != s.ID {
			t.Errorf("%s: %v", line, err)
		}
		recorded = append(recorded, fmt.Sprintf("%s %s %s", e.Action, e.Program, e.Reason))
	}
	want := []string{"warned python line 1: module json, medium; line 2: pattern touch, low: touches", `refused python line 2: pattern \bos\.system\b, critical: runs a shell; line 2: pattern touch, low: touches`}
	if len(recorded) < 10 || cmp.Diff(want, recorded[:2]) != "" {
		t.Errorf("recorded %q", recorded)
	}
}

// The sandbox's Python is the sandbox's: its answer can add imports, and take none away.
func TestCodePolicyWithALyingPython(t *testing.T) {
	testenv.SameForAll(t)
	d := shared(t)
	s := d.Create(t, api.CreateSandbox{Env: []string{"PATH=/tmp/lies:/usr/local/bin:/usr/bin:/bin"}})
	const policy = "version: 1\nmodules: [{module: os, languages: python}]"
	for _, c := range []struct {
		script, code string
		refused      bool
	}{
		{"cat >/dev/null; echo end", "import os", true},
		{"cat >/dev/null; echo end", "import re", false},
		{"cat >/dev/null; echo 7 os; echo end", "import re", true},
		{"cat >/dev/null; echo nonsense", "import re", true},
		{"exit 3", "import re", true},
		{"yes 1 x", "import re", true},
	} {
		s.Sh(t, "mkdir -p /tmp/lies && printf '#!/bin/sh\\n[ \"$1\" = -I ] || exit 0\\n%s\\n' '"+c.script+"' >/tmp/lies/python3 && chmod 755 /tmp/lies/python3")
		if got, refused := judged(t, d, s, api.CodeRequest{Code: c.code, Policy: policy}); refused != c.refused {
			t.Errorf("%s, %s: %q, refused %v", c.script, c.code, got, refused)
		}
	}
	// One that never ends takes no more than the longest answer does.
	_, err := d.Client(t).RunCode(t.Context(), s.ID, api.CodeRequest{Code: "import re", Policy: policy})
	wantProblem(t, err, api.CodeRefused, "longer than")
}

// The operator's hook judges code that the policies let pass, through the broker.
func TestCodeHook(t *testing.T) {
	testenv.SameForAll(t)
	dir, err := os.MkdirTemp("", "hook") //nolint:usetesting // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	l, err := net.Listen("unix", filepath.Join(dir, "hook.sock"))
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan map[string]any, 20)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var q map[string]any
		if err := json.NewDecoder(r.Body).Decode(&q); err != nil {
			t.Error(err)
		}
		asked <- q
		answer := map[string]any{"decision": "allow"}
		switch code, _ := q["code"].(string); {
		case strings.Contains(code, "deny"):
			answer = map[string]any{"decision": "deny", "reason": "not today"}
		case strings.Contains(code, "amend"):
			answer["code"] = "print('amended')"
		case strings.Contains(code, "worse"):
			answer["code"] = "import os"
		}
		_ = json.NewEncoder(w).Encode(answer)
	})}
	go server.Serve(l) //nolint:errcheck // ends with the server
	t.Cleanup(func() { _ = server.Close() })
	d := harness.Start(t, harness.Options{Args: []string{"--code-hook", "unix:" + l.Addr().String(), "--code-policy", "strict"}})
	s := d.Create(t, api.CreateSandbox{})
	c := newContext(t, d, s, api.CreateContext{})
	for _, context := range []string{"", c.ID} {
		run := func(code string) (*api.CodeResult, error) {
			return d.Client(t).RunCode(t.Context(), s.ID, api.CodeRequest{Context: context, Code: code})
		}
		if res, err := run("print('allow')"); err != nil || res.Logs.Stdout != "allow\n" || res.Amended {
			t.Errorf("%+v, %v", res, err)
		}
		q := <-asked
		want := map[string]any{"tenant": "", "sandbox": s.ID, "language": "python", "code": "print('allow')", "findings": []any{}}
		if context != "" {
			want["context"] = context
		}
		if diff := cmp.Diff(want, q); diff != "" {
			t.Errorf("question: %s", diff)
		}
		_, err := run("print('deny')")
		wantProblem(t, err, api.CodeRefused, "the operator's hook denies it: not today")
		<-asked
		if res, err := run("print('amend')"); err != nil || res.Logs.Stdout != "amended\n" || !res.Amended {
			t.Errorf("%+v, %v", res, err)
		}
		<-asked
		_, err = run("print('worse')") // the hook's code is judged too
		wantProblem(t, err, api.CodeRefused, "module os")
		<-asked
		_, err = run("import os")
		wantProblem(t, err, api.CodeRefused, "module os")
		if len(asked) > 0 {
			t.Errorf("the hook is asked about refused code: %v", <-asked)
		}
	}
	_ = server.Close()
	_, err = d.Client(t).RunCode(t.Context(), s.ID, api.CodeRequest{Code: "print(1)"})
	wantProblem(t, err, api.CodeRefused, "the operator's hook gave no decision")
	if strings.Contains(err.Error(), dir) {
		t.Errorf("%v has the path", err)
	}
}
