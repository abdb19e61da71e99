package docker

import (
	"cmp"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/attack"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/tests/harness"
)

// minAttacks is how many attacks there are at least: none gets lost.
const minAttacks = 270

// tryAll tries the attacks that its arguments name, one group of [attack.Groups] after another, and
// prints 0 and the result of each, or the exit code of the program that tried it and was killed.
const tryAll = `set -f
for group; do
	set -- $group
	while [ $# -gt 0 ]; do
		left=$#
		said=$(timeout 300 /attacker attack try "$@" 2>/dev/null); code=$?
		IFS='
'
		for line in $said; do echo "0 $line"; shift; done
		unset IFS
		if [ $code -ne 0 ] && [ $# -gt 0 ] || [ $# -eq $left ]; then echo "$code "; shift; fi
	done
done`

// No attack of the corpus works in a container, whoever it runs as and whether it comes by docker
// run or docker exec, and each is stopped by the error that stops it in a sandbox of our own API.
// That they work where nothing holds them is for security.TestAttacksAreRefused.
func TestAttacksThroughDockerRun(t *testing.T) {
	f := start(t)
	attacker, err := os.ReadFile(harness.Helper(t, "attacker"))
	if err != nil {
		t.Fatal(err)
	}
	files := append(harness.Busybox(t), harness.File{Name: "attacker", Body: string(attacker), Mode: 0o755})
	if status, answer := f.do(t, "POST", "/images/create?fromSrc=-&repo=attack&tag=1", "application/x-tar", harness.Tar(t, files...)); status != http.StatusOK {
		t.Fatalf("import: %d %s", status, answer)
	}
	var names []string
	for _, a := range attack.Corpus() {
		names = append(names, a.Name)
	}
	if len(names) < minAttacks {
		t.Fatalf("%d attacks, want %d", len(names), minAttacks)
	}
	argv := []string{"sh", "-c", tryAll, "sh"}
	for _, group := range attack.Groups(names) {
		argv = append(argv, strings.Join(group, " "))
	}
	docker := filepath.Join(f.bin, "docker")
	t.Run("users", func(t *testing.T) {
		for _, user := range []string{"0:0", "1000:1000"} {
			t.Run(user, func(t *testing.T) {
				t.Parallel() // some attacks wait
				s := f.Create(t, api.CreateSandbox{Image: "attack:1", User: user})
				defer s.Delete(t)
				// One for each user: attacks of the other would find their files in it.
				box := "box-" + strings.ReplaceAll(user, ":", "-")
				f.must(t, docker, "run", "-d", "--name", box, "attack:1", "sleep", "1000000")
				defer f.must(t, docker, "rm", "-f", box)
				for _, sb := range f.List(t) {
					if sb.Profile != "default" {
						t.Errorf("the container has the profile %s", sb.Profile)
					}
				}
				native := s.Exec(t, api.ExecRequest{Argv: argv, Timeout: testenv.HungAfter.Seconds()})
				want := outcomes(t, names, native.Stdout)
				for way, args := range map[string][]string{
					"run": append([]string{"run", "--rm", "-u", user, "attack:1"}, argv...), "exec": append([]string{"exec", "-u", user, box}, argv...),
				} {
					for name, got := range outcomes(t, names, f.must(t, docker, args...)) {
						if got == "" || got != want[name] {
							t.Errorf("docker %s: %s is stopped by %q, and by %q in a sandbox", way, name, got, want[name])
						}
					}
				}
			})
		}
	})
	t.Logf("%d attacks", len(names))
}

// outcomes returns what has stopped each attack: an error, a signal, or "" if it worked.
func outcomes(t *testing.T, names []string, output string) map[string]string {
	t.Helper()
	all := make(map[string]string)
	lines := strings.Split(strings.TrimSpace(output), "\n")
	if len(lines) != len(names) {
		t.Fatalf("%d results of %d attacks", len(lines), len(names))
	}
	for i, line := range lines {
		status, result, _ := strings.Cut(line, " ")
		if code, err := strconv.Atoi(status); err != nil || code != 0 {
			all[names[i]] = "exit code " + status // killed
			continue
		}
		r, err := attack.Decode(result)
		if err != nil || r.Attack != names[i] {
			t.Fatalf("%s: %q, %v", names[i], line, err)
		}
		if !r.Worked {
			all[names[i]] = cmp.Or(r.Errno, r.Detail, "stopped")
		}
	}
	for _, name := range names {
		if _, ok := all[name]; !ok {
			all[name] = ""
		}
	}
	return all
}
