package confine

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// decide runs a filter's program as the kernel does, but with words in network order, as the
// package's machine reads them.
func decide(t *testing.T, vm *bpf.VM, arch, number uint32, args ...uint32) uint32 {
	t.Helper()
	data := make([]byte, 64)
	binary.BigEndian.PutUint32(data[offsetNumber:], number)
	binary.BigEndian.PutUint32(data[offsetArch:], arch)
	for i, a := range args {
		binary.BigEndian.PutUint32(data[offsetArgs+8*i:], a)
	}
	got, err := vm.Run(data)
	if err != nil {
		t.Fatal(err)
	}
	return uint32(got)
}

func TestGatewayFilter(t *testing.T) {
	const pid = 4711
	const allow, deny, kill = unix.SECCOMP_RET_ALLOW, unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM), uint32(unix.SECCOMP_RET_KILL_PROCESS)
	for goarch, arch := range map[string]uint32{"amd64": archAMD64, "arm64": archARM64} {
		raw, err := gatewayFilter(pid).assemble(goarch)
		if err != nil {
			t.Fatal(err)
		}
		program, ok := bpf.Disassemble(raw)
		if !ok || len(program) > unix.BPF_MAXINSNS {
			t.Fatalf("%d instructions, known: %v", len(program), ok)
		}
		vm, err := bpf.NewVM(program)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct {
			name   string
			want   uint32
			arch   uint32
			number uint32
			args   []uint32
		}{
			{"splice", allow, arch, unix.SYS_SPLICE, nil},
			{"the last of the list", allow, arch, unix.SYS_EXIT_GROUP, nil},
			{"another architecture", kill, arch + 1, unix.SYS_SPLICE, nil},
			{"x32", deny, arch, unix.SYS_SPLICE | x32, nil},
			{"execve", deny, arch, unix.SYS_EXECVE, nil},
			{"bind", deny, arch, unix.SYS_BIND, nil},
			{"listen", deny, arch, unix.SYS_LISTEN, nil},
			{"ioctl", deny, arch, unix.SYS_IOCTL, nil},
			{"no call", deny, arch, 1000, nil},
			{"socket of TCP", allow, arch, unix.SYS_SOCKET, []uint32{unix.AF_INET6, unix.SOCK_STREAM | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK, 0}},
			{"socket of UDP", allow, arch, unix.SYS_SOCKET, []uint32{unix.AF_INET, unix.SOCK_DGRAM, 0}},
			{"raw socket", deny, arch, unix.SYS_SOCKET, []uint32{unix.AF_INET, unix.SOCK_RAW, 0}},
			{"socket of MPTCP", deny, arch, unix.SYS_SOCKET, []uint32{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP}},
			{"Unix socket", deny, arch, unix.SYS_SOCKET, []uint32{unix.AF_UNIX, unix.SOCK_STREAM, 0}},
			{"a linger", allow, arch, unix.SYS_SETSOCKOPT, []uint32{3, unix.SOL_SOCKET, unix.SO_LINGER}},
			{"the option of another level", deny, arch, unix.SYS_SETSOCKOPT, []uint32{3, unix.SOL_TCP, unix.SO_LINGER}},
			{"a transparent socket", deny, arch, unix.SYS_SETSOCKOPT, []uint32{3, unix.SOL_IP, unix.IP_TRANSPARENT}},
			{"a larger pipe", allow, arch, unix.SYS_FCNTL, []uint32{3, unix.F_SETPIPE_SZ}},
			{"an owner", deny, arch, unix.SYS_FCNTL, []uint32{3, unix.F_SETOWN}},
			{"reading", allow, arch, unix.SYS_OPENAT, []uint32{0, 0, unix.O_RDONLY | unix.O_CLOEXEC}},
			{"writing", deny, arch, unix.SYS_OPENAT, []uint32{0, 0, unix.O_WRONLY}},
			{"reading and writing", deny, arch, unix.SYS_OPENAT, []uint32{0, 0, unix.O_RDWR}},
			{"creating", deny, arch, unix.SYS_OPENAT, []uint32{0, 0, unix.O_CREAT}},
			{"truncating", deny, arch, unix.SYS_OPENAT, []uint32{0, 0, unix.O_TRUNC}},
			{"memory", allow, arch, unix.SYS_MMAP, []uint32{0, 0, unix.PROT_READ | unix.PROT_WRITE, unix.MAP_ANONYMOUS | unix.MAP_PRIVATE}},
			{"memory of a file", deny, arch, unix.SYS_MMAP, []uint32{0, 0, unix.PROT_READ, unix.MAP_PRIVATE}},
			{"memory that executes", deny, arch, unix.SYS_MMAP, []uint32{0, 0, unix.PROT_EXEC, unix.MAP_ANONYMOUS}},
			{"a thread", allow, arch, unix.SYS_CLONE, []uint32{unix.CLONE_VM | unix.CLONE_FS | unix.CLONE_FILES | unix.CLONE_SIGHAND | unix.CLONE_SYSVSEM | unix.CLONE_THREAD}},
			{"a process", deny, arch, unix.SYS_CLONE, []uint32{unix.CLONE_VM | unix.CLONE_VFORK | uint32(unix.SIGCHLD)}},
			{"a thread in a namespace", deny, arch, unix.SYS_CLONE, []uint32{unix.CLONE_VM | unix.CLONE_THREAD | unix.CLONE_NEWNET}},
			{"a signal to itself", allow, arch, unix.SYS_TGKILL, []uint32{pid}},
			{"a signal to another", deny, arch, unix.SYS_TGKILL, []uint32{pid + 1}},
		} {
			if got := decide(t, vm, c.arch, c.number, c.args...); got != c.want {
				t.Errorf("%s, %s: %#x, want %#x", goarch, c.name, got, c.want)
			}
		}
	}
	if _, err := gatewayFilter(pid).assemble("mips"); err == nil {
		t.Error("a filter for an unknown architecture")
	}
}

// A filter that is not loaded is found.
func TestVerifyFilter(t *testing.T) {
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_GETPID, 0, 0, 0); errno == unix.ENOTSUP {
		t.Skip("this program has cgo, with which there is no system call on all threads; the lanes build it without")
	}
	if err := (filter{}).verify(); !errors.Is(err, errWorked) {
		t.Errorf("without a filter: %v", err)
	}
}

// A gateway without Landlock has everything else, and names the missing one.
func TestGatewayWithoutLandlock(t *testing.T) {
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_GETPID, 0, 0, 0); errno == unix.ENOTSUP {
		t.Skip("this program has cgo, with which there is no system call on all threads; the lanes build it without")
	}
	if out, err := exec.CommandContext(t.Context(), "/proc/self/exe", "gateway").CombinedOutput(); err != nil {
		t.Errorf("%v:\n%s", err, out)
	}
	if missing := (Gateway{}).Missing(); len(missing) != 1 {
		t.Errorf("missing: %q", missing)
	}
	if missing := (Gateway{ABI: 2}).Missing(); len(missing) != 0 {
		t.Errorf("missing with Landlock: %q", missing)
	}
}

// gatewayWithoutLandlock is the process of that test.
func gatewayWithoutLandlock() error {
	held, err := Gateway{}.Apply()
	if err != nil {
		return err
	}
	defer held.Close()
	if _, err := os.ReadFile("/etc/hosts"); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.WriteFile(os.DevNull, nil, 0); !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("write to a file: %w", cmp.Or(err, errWorked))
	}
	return nil
}

// The filter of a face lets it make Unix sockets, and neither others nor what changes files.
func TestFaceFilter(t *testing.T) {
	const allow, deny = unix.SECCOMP_RET_ALLOW, unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	for goarch, arch := range map[string]uint32{"amd64": archAMD64, "arm64": archARM64} {
		raw, err := faceFilter(4711).assemble(goarch)
		if err != nil {
			t.Fatal(err)
		}
		program, ok := bpf.Disassemble(raw)
		if !ok {
			t.Fatal("it has unknown instructions")
		}
		vm, err := bpf.NewVM(program)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct {
			name   string
			want   uint32
			number uint32
			args   []uint32
		}{
			{"Unix socket", allow, unix.SYS_SOCKET, []uint32{unix.AF_UNIX, unix.SOCK_STREAM | unix.SOCK_CLOEXEC, 0}},
			{"socket of TCP", deny, unix.SYS_SOCKET, []uint32{unix.AF_INET, unix.SOCK_STREAM, 0}},
			{"socket of TCP over IPv6", deny, unix.SYS_SOCKET, []uint32{unix.AF_INET6, unix.SOCK_STREAM, 0}},
			{"netlink", deny, unix.SYS_SOCKET, []uint32{unix.AF_NETLINK, unix.SOCK_RAW, 0}},
			{"what is not read yet", allow, unix.SYS_IOCTL, []uint32{3, unix.TIOCOUTQ}},
			{"input of a terminal", deny, unix.SYS_IOCTL, []uint32{3, unix.TIOCSTI}},
			{"execve", deny, unix.SYS_EXECVE, nil},
			{"bind", deny, unix.SYS_BIND, nil},
			{"writing", deny, unix.SYS_OPENAT, []uint32{0, 0, unix.O_WRONLY}},
			{"unlink", deny, unix.SYS_UNLINKAT, nil},
			{"a signal to another", deny, unix.SYS_TGKILL, []uint32{4712, 4712, 9}},
		} {
			if got := decide(t, vm, arch, c.number, c.args...); got != c.want {
				t.Errorf("%s: %s: %#x, want %#x", goarch, c.name, got, c.want)
			}
		}
	}
}
