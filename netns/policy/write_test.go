package policy

import "testing"

func TestDocument(t *testing.T) {
	p := parse(t, `
version: 1
presets: crates
rules:
- allow: [example.com, "*.example.org", 10.0.0.0/8, "fd00::1"]
  ports: [443, 8000-8001]
  protocol: [tcp, udp]
- {name: "null", deny: "*", inspect: true, methods: ["NULL"], paths: [/a/*, /%C3%BC/*/b, /*, /]}
- {name: "rules[7]", allow: a.test}
- {deny: b.test, protocol: tcp, ports: 22}
services:
- {port: 80, to: "127.0.0.1:8080"}
- {name: "a: b # c", port: 81, to: "unix:a-b", inspect: true, methods: GET}
`)
	const want = `version: 1
rules:
  - allow:
      - example.com
      - '*.example.org'
      - 10.0.0.0/8
      - fd00::1
    ports: [443, 8000-8001]
    protocol: [tcp, udp]
  - name: "null"
    deny: '*'
    ports: any
    protocol: [tcp, udp]
    inspect: true
    methods: "NULL"
    paths:
      - /a/*
      - /%C3%BC/*/b
      - /*
      - /
  - name: rules[7]
    allow: a.test
    ports: [80, 443]
  - deny: b.test
    ports: 22
    protocol: tcp
  - name: crates[0]
    allow:
      - index.crates.io
      - static.crates.io
    ports: 443
  - name: crates[1]
    allow: crates.io
    ports: 443
    inspect: true
    methods: [GET, HEAD]
services:
  - port: 80
    to: 127.0.0.1:8080
  - name: 'a: b # c'
    port: 81
    to: unix:a-b
    inspect: true
    methods: GET
`
	got, err := p.Document()
	if err != nil || string(got) != want {
		t.Errorf("%v\n%s", err, got)
	}
	empty, err := new(Policy).Document()
	if err != nil || string(empty) != "version: 1\nrules: []\n" {
		t.Errorf("%v %q", err, empty)
	}
	for _, name := range Presets() {
		preset, err := Preset(name)
		if err != nil {
			t.Fatal(err)
		}
		same(t, preset)
	}
	same(t, p)
}

// same checks that a policy and its document decide alike.
func same(t *testing.T, p *Policy) {
	t.Helper()
	doc, err := p.Document()
	if err != nil {
		t.Fatal(err)
	}
	q, err := Parse(doc)
	if err != nil {
		t.Fatalf("%v in\n%s", err, doc)
	}
	for _, pair := range [][2]*Policy{{p, q}, {q, p}} {
		if e, wider, _ := Widens(pair[0], pair[1]); wider {
			t.Errorf("the document decides otherwise about %s:\n%s", e, doc)
		}
	}
	if again, err := q.Document(); err != nil || string(again) != string(doc) {
		t.Errorf("%v: the document of\n%s\nis\n%s", err, doc, again)
	}
}
