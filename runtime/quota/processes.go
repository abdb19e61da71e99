package quota

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Processes counts files that have no name any more and that processes hold open or mapped. Measure
// does not see them, and they take space until they are closed. A descriptor on its way between two
// processes is not seen either.
type Processes struct {
	// Proc is the mount point of proc(5).
	Proc string
	// Since leaves out files whose last change is earlier: deleted files of an image, which lie in a
	// layer below and take no space of the sandbox.
	Since unix.Timespec
	// Below are ends of paths in their file system: files without a name that were opened through a
	// mount of such a directory count too. With Only, those on overlays do not count.
	Below []string
	Only  bool
}

// Measure returns the usage of the processes pids. A mapped file without a descriptor counts with
// the length that is mapped, because the kernel shows its blocks to root of the host alone.
func (p Processes) Measure(pids []int) Usage {
	held, mapped := make(map[inode]int64), make(map[inode]int64)
	for _, pid := range pids {
		dir := filepath.Join(p.Proc, strconv.Itoa(pid))
		at := &mounts{file: filepath.Join(dir, "mountinfo"), below: p.Below, only: p.Only}
		p.descriptors(dir, at, held)
		mappings(dir, at, mapped)
	}
	var used Usage
	for _, size := range held {
		used = used.plus(Usage{size, 1})
	}
	for file, size := range mapped {
		if _, ok := held[file]; !ok {
			used = used.plus(Usage{size, 1})
		}
	}
	return used
}

// descriptors notes the files without a name that a process has open. Processes and descriptors may
// vanish meanwhile.
func (p Processes) descriptors(dir string, at *mounts, held map[inode]int64) {
	entries, err := os.ReadDir(filepath.Join(dir, "fd"))
	if err != nil {
		return
	}
	for _, e := range entries {
		path := filepath.Join(dir, "fd", e.Name())
		var st unix.Stat_t
		if unix.Stat(path, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink > 0 {
			continue
		}
		var fs unix.Statfs_t
		if unix.Statfs(path, &fs) != nil {
			continue
		}
		overlay := fs.Type == unix.OVERLAYFS_SUPER_MAGIC // not memfd_create(2), nor a tmpfs
		if overlay && !p.Only && !p.older(&st) || !overlay && at.has(filepath.Join(dir, "fdinfo", e.Name())) {
			held[inode{uint64(st.Dev), st.Ino}] = st.Blocks * 512 //nolint:unconvert // Dev has another type elsewhere
		}
	}
}

func (p Processes) older(st *unix.Stat_t) bool {
	return st.Ctim.Sec < p.Since.Sec || st.Ctim.Sec == p.Since.Sec && st.Ctim.Nsec < p.Since.Nsec
}

// mounts are those of one process, read when they are needed first.
type mounts struct {
	file  string
	below []string
	only  bool

	read    bool
	ids     map[string]bool // of mounts of the directories below
	devices map[uint64]bool // of files that count
}

func (m *mounts) load() {
	if m.read {
		return
	}
	m.read = true
	data, err := os.ReadFile(m.file)
	if err != nil {
		return // the process has ended
	}
	m.ids, m.devices = mountsOf(data, m.below)
	if !m.only {
		for device := range overlays(data) {
			m.devices[device] = true
		}
	}
}

// has reports whether a descriptor was opened through a mount of the directories below, by its file
// in fdinfo.
func (m *mounts) has(fdinfo string) bool {
	if len(m.below) == 0 {
		return false
	}
	data, err := os.ReadFile(fdinfo)
	if err != nil {
		return false
	}
	_, rest, ok := bytes.Cut(data, []byte("mnt_id:\t"))
	id, _, _ := bytes.Cut(rest, []byte("\n"))
	m.load()
	return ok && m.ids[string(id)]
}

// mountsOf returns the ids and devices of the mounts whose root has one of the ends, in a mountinfo
// of proc(5).
func mountsOf(mountinfo []byte, below []string) (ids map[string]bool, devices map[uint64]bool) {
	ids, devices = make(map[string]bool), make(map[uint64]bool)
	for line := range bytes.Lines(mountinfo) {
		fields := bytes.Fields(line)
		if len(fields) < 4 {
			continue
		}
		for _, end := range below {
			if !strings.HasSuffix(string(fields[3]), end) {
				continue
			}
			ids[string(fields[0])] = true
			if device, ok := deviceOf(fields[2]); ok {
				devices[device] = true
			}
		}
	}
	return ids, devices
}

// deviceOf reads a device as in mountinfo.
func deviceOf(text []byte) (device uint64, ok bool) {
	major, minor, _ := bytes.Cut(text, []byte(":"))
	a, err1 := strconv.ParseUint(string(major), 10, 32)
	b, err2 := strconv.ParseUint(string(minor), 10, 32)
	return unix.Mkdev(uint32(a), uint32(b)), err1 == nil && err2 == nil
}

// mappings notes the files without a name that a process has mapped for writing and sharing, on
// overlays and on the devices of the directories below: which of these a file is in, it does not
// say.
func mappings(dir string, at *mounts, mapped map[inode]int64) {
	data, err := os.ReadFile(filepath.Join(dir, "maps"))
	if err != nil {
		return
	}
	for line := range bytes.Lines(data) {
		file, end, ok := parseMapping(line)
		if !ok {
			continue
		}
		if at.load(); at.devices[file.dev] {
			mapped[file] = max(mapped[file], end)
		}
	}
}

// overlays returns the devices of the overlays in a mountinfo of proc(5): that of the root, of a
// workspace, and of directories of the host image.
func overlays(mountinfo []byte) map[uint64]bool {
	devices := make(map[uint64]bool)
	for line := range bytes.Lines(mountinfo) {
		mount, of, ok := bytes.Cut(line, []byte(" - "))
		fields := bytes.Fields(mount)
		if !ok || len(fields) < 3 || !bytes.HasPrefix(of, []byte("overlay ")) {
			continue
		}
		if device, ok := deviceOf(fields[2]); ok {
			devices[device] = true
		}
	}
	return devices
}

// parseMapping reads a line of /proc/PID/maps. It returns the file of a shared mapping of a deleted
// file, and the offset of the mapping's end in it.
func parseMapping(line []byte) (file inode, end int64, ok bool) {
	line = bytes.TrimRight(line, "\n")
	if !bytes.HasSuffix(line, []byte(" (deleted)")) {
		return file, 0, false
	}
	fields := bytes.Fields(line)
	if len(fields) < 6 || len(fields[1]) != 4 || fields[1][3] != 's' {
		return file, 0, false
	}
	from, to, ok1 := bytes.Cut(fields[0], []byte("-"))
	major, minor, ok2 := bytes.Cut(fields[3], []byte(":"))
	if !ok1 || !ok2 {
		return file, 0, false
	}
	var numbers [6]uint64
	for i, n := range []struct {
		text []byte
		base int
		bits int
	}{{from, 16, 64}, {to, 16, 64}, {fields[2], 16, 63}, {major, 16, 32}, {minor, 16, 32}, {fields[4], 10, 64}} {
		var err error
		if numbers[i], err = strconv.ParseUint(string(n.text), n.base, n.bits); err != nil {
			return file, 0, false
		}
	}
	size := numbers[1] - numbers[0]
	if numbers[1] < numbers[0] || size > 1<<62 || numbers[2] > 1<<62 {
		return file, 0, false
	}
	file = inode{unix.Mkdev(uint32(numbers[3]), uint32(numbers[4])), numbers[5]} //nolint:gosec // G115: parsed as 32 bits
	return file, int64(size + numbers[2]), true                                  //nolint:gosec // G115: below 1<<63
}
