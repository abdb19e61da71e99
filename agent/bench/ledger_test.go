package bench

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A record is read up to its last complete line, and an event out of order is an error.
func TestLedger(t *testing.T) {
	dir := t.TempDir()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	clock := func() time.Time { now = now.Add(time.Second); return now }
	l, err := createLedger(dir, Config{TaskDir: "/t", LLMName: "m"}, clock)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := openLedger(dir, clock); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("a second process: %v", err)
	}
	for _, e := range []event{{Answered: &Answered{Index: 1, Answer: "<x>"}}, {Scored: &Scored{Index: 1, Score: 0.5}}, {Answered: &Answered{Index: 0}}} {
		if err := l.add(e); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.file.Close(); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, LedgerName)
	whole, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	// A crash in the middle of a line.
	if err := os.WriteFile(name, append(bytes.Clone(whole), `{"v":1,"n":5,"scor`...), 0o600); err != nil {
		t.Fatal(err)
	}
	now = now.Add(time.Hour) // no process works in this hour
	if l, err = openLedger(dir, clock); err != nil {
		t.Fatal(err)
	}
	if err := l.add(event{Resumed: &struct{}{}}); err != nil {
		t.Fatal(err)
	}
	if err := l.add(event{Scored: &Scored{Index: 0, Score: 1}}); err != nil {
		t.Fatal(err)
	}
	a, s := l.of(1)
	if a == nil || a.Answer != "<x>" || s == nil || s.Score != 0.5 || l.begin.LLMName != "m" || l.elapsed() != 4*time.Second {
		t.Errorf("%+v, %+v, %+v, %v", a, s, l.begin, l.elapsed())
	}
	if err := l.file.Close(); err != nil {
		t.Fatal(err)
	}
	if c, err := ReadConfig(dir); err != nil || c.TaskDir != "/t" {
		t.Errorf("%+v, %v", c, err)
	}
	begin, _, _ := bytes.Cut(whole, []byte("\n"))
	for _, lines := range []string{
		"", "x\n", `{"v":2,"n":1,"begin":{}}`, `{"v":1,"n":1,"scored":{}}`,
		string(begin) + "\n" + `{"v":1,"n":3,"answered":{}}`, string(begin) + "\n" + string(begin), string(begin) + "\n" + `{"v":1,"n":2}`,
		string(begin) + "\n" + `{"v":1,"n":2,"scored":{"index":0}}`, string(begin) + "\n" + `{"v":1,"n":2,"answered":{}}` + "\n" + `{"v":1,"n":3,"answered":{}}`,
		string(begin) + "\n" + `{"v":1,"n":2,"answered":{}}` + "\n" + `{"v":1,"n":3,"scored":{"score":2}}`,
	} {
		if err := os.WriteFile(name, []byte(lines+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if l, err := openLedger(dir, clock); err == nil {
			t.Errorf("it takes %s", lines)
			_ = l.file.Close()
		}
	}
}

func FuzzLedger(f *testing.F) {
	f.Add([]byte(`{"v":1,"n":1,"begin":{"mode":"llm"}}` + "\n" + `{"v":1,"n":2,"answered":{"index":3}}` + "\n" + `{"v":1,"n":3,"scored":{"index":3,"score":1}}` + "\n" + `{"v":1`))
	f.Fuzz(func(t *testing.T, data []byte) {
		l := &ledger{answered: map[int]*Answered{}, scored: map[int]*Scored{}}
		whole, err := l.read(bytes.NewReader(data))
		if err != nil {
			return
		}
		if whole > int64(len(data)) || l.n == 0 || whole > 0 && data[whole-1] != '\n' {
			t.Errorf("%d of %d bytes are %d whole lines", whole, len(data), l.n)
		}
		for i, s := range l.scored {
			if l.answered[i] == nil || valid(s.Score) != nil {
				t.Errorf("%d is scored %+v", i, s)
			}
		}
	})
}
