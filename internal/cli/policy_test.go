package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const (
	recordText = `{"time":"2026-11-23T12:00:00Z","kind":"query","protocol":"dns","name":"pypi.org","port":53,"method":"A","allow":true}
{"time":"2026-11-23T12:00:01Z","kind":"connection","protocol":"tls","name":"pypi.org","address":"151.101.0.223","port":443,"allow":true,"out":9}
{"time":"2026-11-23T12:00:01Z","kind":"connection","protocol":"tls","name":"pypi.org","address":"151.101.64.223","port":443,"allow":true,"out":9}
{"time":"2026-11-23T12:00:02Z","kind":"query","protocol":"dns","name":"unused.example.com","port":53,"method":"A","allow":true}
{"time":"2026-11-23T12:00:03Z","kind":"request","protocol":"http","name":"npm.test","address":"1.1.1.1","port":80,"method":"GET","path":"/x","allow":true}
{"time":"2026-11-23T12:00:04Z","kind":"connection","protocol":"tls","address":"1.1.1.1","port":443,"allow":false}
{"time":"2026-11-23T12:00:05Z","kind":"query","protocol":"dns","name":"\u001b[2J","port":53,"method":"A","allow":false}
`
	learnedText = `# Learned from 5 flows, 2026-11-23 12:00:00 to 2026-11-23 12:00:05 UTC.
# Flows that were refused are left out: 2.
# Names that were looked up and never connected to are left out:
#   unused.example.com (1)
version: 1
rules:
  - allow: npm.test # 1 request
    ports: 80
    inspect: true
    methods: GET
    paths: /x
  - allow: pypi.org # 2 connections
    ports: 443
`
)

// The commands about policies need no daemon.
func TestPolicy(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"good.yaml":    "version: 1\nrules: [{allow: a.test}]\n",
		"same.yaml":    "version: 1\nrules: [{allow: a.test, ports: 80}, {allow: a.test, ports: 443}]\n",
		"wrong.yaml":   "version: 1\nrules:\n- allow: a..b\n- port: 1\n",
		"one.yaml":     "version: 1\nrulez: []\n",
		"syntax.yaml":  "version: 1\nrules: [\n",
		"escape.yaml":  "version: 1\nrules:\n- {name: \"x\\u202e\", allow: a.test}\n- {name: \"\\u202ey\", allow: a.test}\n",
		"npm":          "version: 2\n",
		"flows.jsonl":  recordText,
		"broken.jsonl": recordText[:strings.Index(recordText, "\n")+1] + "{",
		"other.jsonl":  "{\"level\":\"info\"}\n",
		"learned.yaml": learnedText,
		"moved.yaml":   "version: 1\nrules: [{name: web, allow: [pypi.org, 1.1.1.1], ports: 443}, {name: no, deny: npm.test, protocol: tcp, ports: 80}, {name: npm, allow: npm.test}]",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	for _, tc := range []struct {
		args, stdin    string
		code           int
		stdout, stderr string // whole; stderr a part
	}{
		{args: "check good.yaml", stdout: "good.yaml: no mistakes\n"},
		{args: "check -", stdin: learnedText, stdout: "-: no mistakes\n"},
		{args: "check wrong.yaml", code: 1, stdout: "wrong.yaml:3:10: hosts: host name \"a..b\": empty label\n" +
			"wrong.yaml:4:3: rule has no key \"port\"\nwrong.yaml:4:3: a rule has either allow or deny\n"},
		{args: "check syntax.yaml", code: 1, stdout: "syntax.yaml:2:1: did not find expected node content\n"},
		{args: "check npm", code: 1, stdout: "./npm:1:10: version is not 1\n"},
		{args: "check none.yaml", code: 1, stderr: "read the policy: open none.yaml: no such file"},
		{args: "check escape.yaml", stdout: "escape.yaml:3:3: warning: x\\u202e: the rule has no effect: other rules deny or allow all that it covers\n" +
			"escape.yaml:4:3: warning: \\u202ey: the rule has no effect: other rules deny or allow all that it covers\n"},
		{args: "check --json one.yaml", code: 1, stdout: `{
  "mistakes": [
    {
      "line": 2,
      "column": 1,
      "message": "policy has no key \"rulez\""
    }
  ],
  "warnings": []
}
`},
		{args: "check", code: 2, stderr: "no argument is given; as in: sandboxd policy check [flags] FILE"},

		{args: "show good.yaml", stdout: "version: 1\nrules:\n  - allow: a.test\n    ports: [80, 443]\n"},
		{args: "show go", stdout: "version: 1\nrules:\n  - name: go[0]\n    allow:\n      - proxy.golang.org\n      - sum.golang.org\n    ports: 443\n"},
		{args: "show", stdout: "crates\ndebian\ngithub-read\ngo\nhuggingface-read\nllm-apis\nnpm\npublic\npypi\nubuntu\n"},
		{args: "show pipy", code: 1, stderr: `no preset "pipy"; there are crates`},
		{args: "show one.yaml", code: 1, stderr: `one.yaml:2:1: policy has no key "rulez"`},
		{args: "show wrong.yaml", code: 1, stderr: `wrong.yaml:3:10: hosts: host name "a..b": empty label, and 2 more that sandboxd policy check shows`},

		{args: "diff good.yaml same.yaml", stdout: "both allow the same\n"},
		{args: "diff pypi pypi,go", code: 1, stdout: "pypi,go allows what pypi refuses: the name proxy.golang.org is resolved\n"},
		{args: "diff pypi,go -", stdin: "{version: 1, presets: pypi}", stdout: "- refuses what pypi,go allows: the name proxy.golang.org is resolved\n"},
		{args: "diff --json pypi go", code: 1, stdout: "{\n  \"more\": \"the name proxy.golang.org is resolved\",\n  \"less\": \"the name pypi.org is resolved\"\n}\n"},
		{args: "diff --json pypi pypi", stdout: "{}\n"},
		{args: "diff - -", code: 2, stderr: "one policy, not two"},
		{args: "diff pypi wrong.yaml", code: 1, stderr: "wrong.yaml:3:10"},

		{args: "learn flows.jsonl", stdout: learnedText},
		{args: "learn -", stdin: recordText, stdout: learnedText},
		{args: "learn broken.jsonl", code: 1, stderr: "read flows: line 2: unexpected end of JSON input"},
		{args: "learn other.jsonl", code: 1, stderr: `line 1: flow of kind "", which is neither`},
		{args: "learn none.jsonl", code: 1, stderr: "read flows: open none.jsonl"},

		{args: "test learned.yaml flows.jsonl", stdout: "VERDICT   FLOWS   WHAT                         WHY\n" +
			"lookup    1       look up unused.example.com   no rule allows unused.example.com\n" +
			"of 7 flows, 0 that were allowed would be refused, and 0 that were refused allowed\n"},
		{args: "test moved.yaml -", stdin: recordText, code: 1, stdout: "VERDICT   FLOWS   WHAT                          WHY\n" +
			"refused   1       GET /x on npm.test port 80    tcp npm.test (1.1.1.1) port 80 is denied (rule no)\n" +
			"allowed   1       connect to 1.1.1.1 port 443   allowed (rule web)\n" +
			"lookup    1       look up unused.example.com    no rule allows unused.example.com\n" +
			"of 7 flows, 1 that were allowed would be refused, and 1 that were refused allowed\n"},
		{args: "test go flows.jsonl", code: 1, stdout: "VERDICT   FLOWS   WHAT                           WHY\n" +
			"refused   1       look up pypi.org               no rule allows pypi.org\n" +
			"refused   2       connect to pypi.org port 443   no rule allows pypi.org\n" +
			"refused   1       GET /x on npm.test port 80     no rule allows npm.test\n" +
			"lookup    1       look up unused.example.com     no rule allows unused.example.com\n" +
			"of 7 flows, 4 that were allowed would be refused, and 0 that were refused allowed\n"},
		{args: "test --json moved.yaml flows.jsonl", code: 1, stdout: `{
  "flows": 7,
  "refused": [
    {
      "count": 1,
      "kind": "request",
      "name": "npm.test",
      "port": 80,
      "method": "GET",
      "path": "/x",
      "rule": "no",
      "reason": "tcp npm.test (1.1.1.1) port 80 is denied"
    }
  ],
  "allowed": [
    {
      "count": 1,
      "kind": "connection",
      "address": "1.1.1.1",
      "port": 443,
      "rule": "web"
    }
  ],
  "lookups": [
    {
      "count": 1,
      "kind": "query",
      "name": "unused.example.com",
      "reason": "no rule allows unused.example.com"
    }
  ]
}
`},
		{
			args: "test go -", stdin: `{"kind":"query","protocol":"dns","name":"a.test","allow":true}` + "\n" +
				`{"kind":"connection","protocol":"tls","name":"a.test","address":"1.1.1.1","port":22,"allow":false}` + "\n",
			stdout: "VERDICT   FLOWS   WHAT             WHY\nlookup    1       look up a.test   no rule allows a.test\n" +
				"of 2 flows, 0 that were allowed would be refused, and 0 that were refused allowed\n",
		},
		{args: "test - -", code: 2, stderr: "either the policy or the record"},
		{args: "test learned.yaml broken.jsonl", code: 1, stderr: "line 2"},
	} {
		t.Run(tc.args, func(t *testing.T) {
			got := inline(t, filepath.Join(dir, "no-daemon"), tc.stdin, append([]string{"policy"}, strings.Fields(tc.args)...)...)
			if diff := cmp.Diff(tc.stdout, got.Stdout); diff != "" {
				t.Errorf("stdout (-want +got):\n%s", diff)
			}
			if got.Code != tc.code || !strings.Contains(got.Stderr, tc.stderr) || tc.stderr == "" && got.Stderr != "" {
				t.Errorf("exit %d, want %d; stderr %q", got.Code, tc.code, got.Stderr)
			}
		})
	}
}
