package resident_test

import (
	"bufio"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/interpreter/resident"
)

// A signal that comes as a piece of code ends interrupts no later run. Node keeps most of these for
// the next piece that is long enough.
func TestNodeKeepsNoInterrupt(t *testing.T) {
	testenv.RequirePeer(t, "node")
	const key = "key"
	k, _ := resident.For("javascript", key)
	cmd := exec.CommandContext(t.Context(), k.Argv[0], k.Argv[1:]...)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = in.Close() // ends it
		_ = cmd.Wait() // how is no matter
	}()
	words := bufio.NewReader(out)
	var n uint32
	run := func(interrupts int, code string) string {
		t.Helper()
		n++
		line, err := k.Encode(&resident.Request{Run: n, Code: code, Interrupts: interrupts})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := in.Write(line); err != nil {
			t.Fatal(err)
		}
		var said strings.Builder
		for end := fmt.Sprintf("\x00%s:d %d ", key, n); !strings.HasSuffix(said.String(), end); {
			word, err := words.ReadString(' ')
			if err != nil {
				t.Fatalf("%v: %q", err, said.String())
			}
			said.WriteString(word)
		}
		return said.String()
	}
	for sent := range 3 {
		run(sent, "process.kill(process.pid, 'SIGINT')")
		run(sent+1, "1")
		if said := run(sent+1, "for (let i = 0; i < 1e8; i++) {}; 'whole'"); !strings.Contains(said, "whole") {
			t.Errorf("it said %q", said)
		}
	}
}
