package libct

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/runtime"
)

// When memory runs out the kernel ends the process with the most memory. To that it adds
// oom_score_adj thousandths of all memory that could be used: the host's, or the limit that is met.
//
// All processes of sandboxes begin with the highest value, so that they end before other programs
// of the host do, and the largest one first. No program can lower its value: /proc is read-only for
// it. Init raises that of each program that it starts. Its own is lower where the limit of the
// sandbox can be met, because the sandbox ends with it. It is lower by no more than it needs: a
// program that forks before it is raised leaves children with a value half way to init's.

// offered is the oom_score_adj of programs.
const offered = 1000

// initMemory is the memory in bytes by which a program may be smaller than init and still ends
// before it: several times what init takes.
const initMemory = 32 << 20

// scoreOfInit returns the oom_score_adj of a sandbox's init. No process may have a lower value than
// root of the host gave the launcher.
func scoreOfInit(limits *api.Limits, host *Host, enforced *api.Enforced) int {
	if enforced.Memory != "cgroup" || limits.Memory <= 0 {
		return offered
	}
	gap := (initMemory*offered + limits.Memory - 1) / limits.Memory
	return max(host.Score, offered-int(min(gap, offered)))
}

// ownScore returns the launcher's own value.
func ownScore() (int, error) {
	text, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return 0, fmt.Errorf("read own order of ending: %w", err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, fmt.Errorf("read own order of ending: %w", err)
	}
	return n, nil
}

// score gives the sandbox's init a value.
func (in *instance) score(n int) error {
	f, err := os.OpenFile("/proc/"+strconv.Itoa(in.pid)+"/oom_score_adj", os.O_WRONLY, 0)
	if err == nil {
		if !in.hasEnded() { // so the file is that of the init, not of a later process with its pid
			_, err = f.WriteString(strconv.Itoa(n))
		}
		err = errors.Join(err, f.Close())
	}
	switch {
	case in.hasEnded():
		return fmt.Errorf("it has ended: %w", runtime.ErrNotFound)
	case err != nil:
		return fmt.Errorf("set the order of ending of its init: %w", err)
	}
	return nil
}
