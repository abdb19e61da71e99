package idmap

import (
	"errors"
	"fmt"
	"os"
	goruntime "runtime"
	"strconv"
	"syscall"
)

// Namespace returns a new user namespace with the maps, in which no process is. It is for
// [unix.MOUNT_ATTR_IDMAP]: a mount has the map of a namespace. The caller must be allowed to write
// any map (user_namespaces(7)).
func Namespace(uid, gid []Range) (*os.File, error) {
	// A namespace comes into being with a process. This one never runs: a traced process stops before
	// its first instruction, and is killed there. Ptrace(2) ties it to this thread.
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	p, err := os.StartProcess("/proc/self/exe", []string{"ids"}, &os.ProcAttr{
		Env: []string{},
		Sys: &syscall.SysProcAttr{
			Cloneflags: syscall.CLONE_NEWUSER, UidMappings: procMap(uid), GidMappings: procMap(gid), GidMappingsEnableSetgroups: true,
			Ptrace: true, Pdeathsig: syscall.SIGKILL,
		},
	})
	if err != nil {
		return nil, fmt.Errorf("make a user namespace: %w", err)
	}
	ns, err := os.Open("/proc/" + strconv.Itoa(p.Pid) + "/ns/user")
	if killed := p.Kill(); killed != nil && !errors.Is(killed, os.ErrProcessDone) {
		err = errors.Join(err, killed)
	}
	if _, waited := p.Wait(); waited != nil {
		err = errors.Join(err, waited)
	}
	if err != nil {
		if ns != nil {
			err = errors.Join(err, ns.Close())
		}
		return nil, fmt.Errorf("make a user namespace: %w", err)
	}
	return ns, nil
}

func procMap(m []Range) []syscall.SysProcIDMap {
	var out []syscall.SysProcIDMap
	for _, r := range m {
		out = append(out, syscall.SysProcIDMap{ContainerID: r.Inside, HostID: r.Outside, Size: r.Size})
	}
	return out
}
