package policy

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// table reads a file of lines, each with a mark before it.
func table(t testing.TB, name string) [][2]string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	var lines [][2]string
	for l := range strings.Lines(string(data)) {
		if l = strings.TrimSuffix(l, "\n"); l == "" || l[0] == '#' {
			continue
		}
		mark, line, _ := strings.Cut(l, " ")
		lines = append(lines, [2]string{mark, strings.NewReplacer("⏎", "\n", "␍", "\r").Replace(line)})
	}
	return lines
}

// tested returns the presets that read lines.
func tested(t *testing.T) map[string]*Policy {
	t.Helper()
	presets := map[string]*Policy{}
	for _, name := range []string{"careful", "strict", "readonly"} {
		p, err := Preset(name)
		if err != nil {
			t.Fatal(err)
		}
		presets[name] = p
	}
	return presets
}

// realShell runs lines in a real shell. The only programs that it finds are canaries, which record
// their names, so that a line runs nothing else.
type realShell struct {
	path, bin, log string
}

// realShells returns the shells of this machine.
func realShells(t testing.TB, canaries ...string) []realShell {
	t.Helper()
	var found []realShell
	for _, name := range []string{"bash", "dash"} {
		path, err := exec.LookPath(name)
		if err != nil {
			continue
		}
		dir := t.TempDir()
		s := realShell{path: path, bin: filepath.Join(dir, "bin"), log: filepath.Join(dir, "log")}
		if err := os.Mkdir(s.bin, 0o755); err != nil {
			t.Fatal(err)
		}
		for _, c := range canaries {
			// Under its own name whatever argv[0] says: exec -a.
			if err := os.WriteFile(filepath.Join(s.bin, c), []byte("#!/bin/sh\necho "+c+" >> "+s.log+"\n"), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		found = append(found, s)
	}
	if len(found) == 0 {
		t.Skip("no bash and no dash on this machine")
	}
	return found
}

// run returns the canaries that a line runs. The shell runs in an empty directory beside bin.
func (s realShell) run(t testing.TB, line string) []string {
	t.Helper()
	if err := os.WriteFile(s.log, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	work := filepath.Join(filepath.Dir(s.bin), "work")
	if err := os.RemoveAll(work); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(work, 0o755); err != nil {
		t.Fatal(err)
	}
	c := exec.Command(s.path, "-c", "ulimit -t 2; ulimit -f 1000; "+line)
	c.Dir, c.Env = work, []string{"PATH=" + s.bin, "HOME=" + work, "FUNCNEST=20"}
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	// All processes of the line hold the pipe; the last one closes it.
	ended, held, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer ended.Close()
	c.ExtraFiles = []*os.File{held}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	held.Close()
	// Some lines run for ever. Of those, the canaries until now are judged.
	hung := time.AfterFunc(4*time.Second, func() { _ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) })
	_ = c.Wait() // a line may end in any way
	_ = ended.SetReadDeadline(time.Now().Add(5 * time.Second))
	_, _ = io.Copy(io.Discard, ended)
	hung.Stop()
	data, err := os.ReadFile(s.log)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(string(data))
}

// TestHostileLines compares the facts with what real shells run.
func TestHostileLines(t *testing.T) {
	presets := tested(t)
	lines := table(t, "hostile.txt")
	for _, l := range lines {
		f := shell(l[1])
		named := slices.Contains(f.Programs, "canary")
		switch {
		case l[0] == "e" && (!f.Evaluates || !f.Opaque), l[0] == "o" && !f.Opaque, l[0] == "n" && !named,
			l[0] == "h" && len(f.Hosts) == 0, l[0] == "p" && !slices.ContainsFunc(f.Programs, func(p string) bool { return strings.Contains(p, "/") }):
			t.Errorf("%s %q: evaluates %v, opaque %v, programs %q, hosts %q", l[0], l[1], f.Evaluates, f.Opaque, f.Programs, f.Hosts)
		}
		for _, name := range []string{"strict", "readonly"} {
			if v := presets[name].Decide(t.Context(), f); v.Action != Deny {
				t.Errorf("%q: %s: %+v", l[1], name, v)
			}
		}
		if v := presets["careful"].Decide(t.Context(), f); (l[0] == "e" || l[0] == "h") && v.Action == Allow {
			t.Errorf("%q: careful: %+v", l[1], v)
		}
	}
	ran := make([]int, 2)
	var all sync.WaitGroup
	for i, s := range realShells(t, "canary") {
		all.Go(func() {
			for _, l := range lines {
				if names := s.run(t, l[1]); len(names) > 0 {
					ran[i]++
				}
			}
		})
	}
	all.Wait()
	t.Logf("of %d lines %d ran the canary", len(lines), ran)
	if slices.Max(ran) < 100 { // the control: 444 in bash 5.2, 163 in dash
		t.Errorf("only %d of %d lines work as attacks", ran[0], len(lines))
	}
}

// TestOrdinaryLines guards against presets that deny the lines that models write.
func TestOrdinaryLines(t *testing.T) {
	letters := map[Action]byte{Allow: 'a', Ask: '?', Deny: 'd'}
	presets := tested(t)
	for _, l := range table(t, "ordinary.txt") {
		var got []byte
		for _, name := range []string{"careful", "strict", "readonly"} {
			got = append(got, letters[presets[name].Decide(t.Context(), shell(l[1])).Action])
		}
		if string(got) != l[0] {
			t.Errorf("%q: %s, want %s: %+v", l[1], got, l[0], shell(l[1]))
		}
	}
}

func TestSameInSh(t *testing.T) {
	for line, want := range map[string]bool{
		"ls | wc -l":                      true,
		"[ -f a ] && echo b":              true,
		"for i in 1 2; do echo $i; done":  true,
		"export X=1; local y=2":           true,
		"[[ -f a ]]":                      true,
		"i=1; echo $((i + 1))":            true,
		"[[ -f a && -d b ]]":              true,
		"[[ a || rm b ]]":                 false,
		"[[ a || $b ]]":                   false,
		"[[ a > b ]]":                     false,
		"((rm))":                          false,
		"((a > b))":                       false,
		"a[0]=1":                          false,
		"echo $[ 1 > 2 ]":                 false,
		`echo $'a\'; rm b; echo \''`:      false,
		"ls &> f":                         false,
		"a=(1)":                           false,
		"f() { echo ${x:0:1}; }; [[ a ]]": false,
		strings.Repeat("x", maxLine+1):    false,
		"$x":                              true, // opaque in both
	} {
		if got := SameInSh(line); got != want {
			t.Errorf("%.60q: %v", line, got)
		}
	}
}
