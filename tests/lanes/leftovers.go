package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// endLeftovers ends the processes that the tests of an interrupted run have left: daemons with
// their sandboxes, which outlive the test binaries, and test binaries behind sudo. It tells them
// by the run's own directory, whose name is unique.
func endLeftovers(ctx context.Context, workDir string) {
	left := leftovers(workDir)
	for _, pid := range left {
		shutDown(ctx, pid)
	}
	for range 3 { // whoever was about to start another one is gone when the next look is taken
		sudo := []string{"-n", "kill", "-KILL", "--"}
		for _, pid := range leftovers(workDir) {
			if err := syscall.Kill(pid, syscall.SIGKILL); errors.Is(err, syscall.EPERM) {
				sudo = append(sudo, strconv.Itoa(pid))
			}
		}
		if len(sudo) > 4 {
			if out, err := exec.CommandContext(ctx, "sudo", sudo...).CombinedOutput(); err != nil {
				fmt.Printf("end what sudo started: %v: %s\n", err, out)
			}
		}
	}
	if len(left) > 0 {
		fmt.Printf("%d processes that the tests had left were ended\n", len(left))
	}
}

// shutDown asks a daemon to end with its launcher, whose paths an ordinary user cannot read. A
// daemon that does not answer is killed like all else.
func shutDown(ctx context.Context, pid int) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	args := strings.Split(string(data), "\x00")
	at := slices.Index(args, "--socket")
	if err != nil || len(args) < 2 || args[1] != "serve" || at < 0 || at+1 >= len(args) {
		return
	}
	var st syscall.Stat_t
	if err := syscall.Stat(fmt.Sprintf("/proc/%d", pid), &st); err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	argv := []string{args[0], "shutdown", "--delete", "--socket", args[at+1]}
	if os.Geteuid() != 0 && st.Uid == 0 {
		argv = append([]string{"sudo", "-n"}, argv...)
	}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	if os.Geteuid() == 0 && st.Uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: st.Uid, Gid: st.Gid}}
	}
	_ = cmd.Run() // see above
}

// leftovers are the processes, but for this one, that were started with a path below the
// directory, or write to a file there, as launchers do.
func leftovers(workDir string) []int {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil
	}
	mine := []byte(workDir + "/")
	var pids []int
	for _, dir := range dirs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil || pid == os.Getpid() {
			continue
		}
		var said []byte
		for _, file := range []string{"cmdline", "environ"} { // the latter can be read of one's own only
			data, _ := os.ReadFile(filepath.Join(dir, file))
			said = append(said, data...)
		}
		for _, fd := range []string{"fd/1", "fd/2"} {
			target, _ := os.Readlink(filepath.Join(dir, fd))
			said = append(said, target...)
		}
		if bytes.Contains(said, mine) {
			pids = append(pids, pid)
		}
	}
	return pids
}
