package idmap

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	mobyuser "github.com/moby/sys/user"
	"golang.org/x/sys/unix"
)

// ErrNotInstalled is in an error of [FindHelpers] where a program is missing, rather than without
// power.
var ErrNotInstalled = errors.New("not installed")

// rootEntry is the name in /etc/subuid whose ranges a daemon started as root uses, if it is there.
const rootEntry = "sandboxd"

// Detect reads the files and looks for the programs that decide, and plans for the calling process.
func Detect() (Plan, error) {
	in, err := Gather()
	if err != nil {
		return Plan{}, err
	}
	return NewPlan(in), nil
}

// Gather collects what [NewPlan] depends on, for the calling process.
func Gather() (Inputs, error) {
	in := Inputs{UID: os.Geteuid(), GID: os.Getegid()}
	var err error
	if in.OwnUID, err = readMap("self", "uid_map"); err != nil {
		return in, fmt.Errorf("read own uid map: %w", err)
	}
	if in.OwnGID, err = readMap("self", "gid_map"); err != nil {
		return in, fmt.Errorf("read own gid map: %w", err)
	}
	names := []string{rootEntry}
	if in.UID != 0 {
		names = []string{strconv.Itoa(in.UID)}
		// A uid without a name is fine: entries may be by number.
		if u, err := user.LookupId(strconv.Itoa(in.UID)); err == nil {
			names = append(names, u.Username)
		}
		in.NewUIDMap, in.NewGIDMap, in.HelperErr = FindHelpers()
	}
	if in.SubUID, err = readSub("subuid", names); err != nil {
		return in, err
	}
	// /etc/subgid names users too, not groups.
	if in.SubGID, err = readSub("subgid", names); err != nil {
		return in, err
	}
	return in, nil
}

// FindHelpers finds newuidmap and newgidmap, and an error where they are missing or have not the
// power to work.
func FindHelpers() (newuidmap, newgidmap string, err error) {
	// The bit is inherited and never cleared: under it a setuid program runs as we do.
	if v, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0); err == nil && v == 1 {
		return "", "", errors.New("no_new_privs is set on the daemon, so newuidmap gets no privileges")
	}
	if newuidmap, err = findHelper("newuidmap", unix.CAP_SETUID); err != nil {
		return "", "", err
	}
	if newgidmap, err = findHelper("newgidmap", unix.CAP_SETGID); err != nil {
		return "", "", err
	}
	return newuidmap, newgidmap, nil
}

func findHelper(name string, capability int) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		// A service manager may give us a PATH without the places where distributions put it.
		for _, dir := range []string{"/usr/bin", "/usr/sbin", "/bin", "/run/wrappers/bin"} {
			if path, err = exec.LookPath(filepath.Join(dir, name)); err == nil {
				break
			}
		}
	}
	if err != nil {
		return "", fmt.Errorf("%s is %w", name, ErrNotInstalled)
	}
	if path, err = filepath.Abs(path); err != nil {
		return "", fmt.Errorf("find %s: %w", name, err)
	}
	if err := privileged(path, capability); err != nil {
		return "", err
	}
	return path, nil
}

// privileged reports why a program would not gain the capability it needs when we execute it.
func privileged(path string, capability int) error {
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("examine helper: %w", err)
	}
	var mount unix.Statfs_t
	if err := unix.Statfs(path, &mount); err != nil {
		return fmt.Errorf("examine file system of %s: %w", path, err)
	}
	if mount.Flags&unix.ST_NOSUID != 0 {
		return fmt.Errorf("%s lies on a file system mounted nosuid", path)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if ok && info.Mode()&fs.ModeSetuid != 0 && st.Uid == 0 {
		return nil
	}
	if fileCapable(path, capability) {
		return nil
	}
	return fmt.Errorf("%s is neither setuid root nor has file capabilities", path)
}

// fileCapable reads the permitted set of security.capability (capabilities(7), "Extended
// attribute"): a little-endian word of revision and flags, then permitted and inheritable words,
// low ids first.
func fileCapable(path string, capability int) bool {
	var buf [64]byte
	n, err := unix.Getxattr(path, "security.capability", buf[:])
	at := 4 + capability/32*8
	if err != nil || at+4 > n {
		return false
	}
	word := uint32(buf[at]) | uint32(buf[at+1])<<8 | uint32(buf[at+2])<<16 | uint32(buf[at+3])<<24
	return word&(1<<(capability%32)) != 0
}

// NextFree is the first id above every range in /etc/subuid and /etc/subgid: where a new entry can
// start.
func NextFree() (int, error) {
	const first = 100000 // SUB_UID_MIN of login.defs
	next := first
	for _, path := range []string{"/etc/subuid", "/etc/subgid"} {
		subs, err := mobyuser.ParseSubIDFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("read subordinate ids: %w", err)
		}
		for _, s := range subs {
			next = max(next, int(s.SubID+s.Count))
		}
	}
	return next, nil
}

func readSub(name string, names []string) ([]Range, error) {
	f, err := os.DirFS("/etc").Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read subordinate ids: %w", err)
	}
	defer f.Close()
	ranges, err := parseSub(f, names)
	if err != nil {
		return nil, fmt.Errorf("read subordinate ids of /etc/%s: %w", name, err)
	}
	return ranges, nil
}

// parseSub takes the ranges of any of names, in the order of the file. A line that cannot be read
// has a count of 0, which [NewPlan] leaves out, as newuidmap does.
func parseSub(r io.Reader, names []string) ([]Range, error) {
	subs, err := mobyuser.ParseSubIDFilter(r, func(s mobyuser.SubID) bool {
		return slices.Contains(names, s.Name)
	})
	if err != nil {
		return nil, err
	}
	var out []Range
	for _, s := range subs {
		out = append(out, Range{Outside: int(s.SubID), Size: int(s.Count)})
	}
	return out, nil
}

// readMap reads a map of a process, a number or "self".
func readMap(process, name string) ([]Range, error) {
	f, err := os.DirFS("/proc").Open(process + "/" + name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return parseMap(f)
}

// parseMap reads the kernel's form: three numbers a line.
func parseMap(r io.Reader) ([]Range, error) {
	var out []Range
	s := bufio.NewScanner(r)
	for s.Scan() {
		fields := strings.Fields(s.Text())
		if len(fields) != 3 {
			return nil, fmt.Errorf("id map line %q has not three numbers", s.Text())
		}
		var n [3]int
		for i, f := range fields {
			v, err := strconv.ParseUint(f, 10, 32)
			if err != nil {
				return nil, fmt.Errorf("id map line %q: %w", s.Text(), err)
			}
			n[i] = int(v)
		}
		out = append(out, Range{Inside: n[0], Outside: n[1], Size: n[2]})
	}
	return out, s.Err()
}
