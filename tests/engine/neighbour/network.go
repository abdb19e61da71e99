package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// network holds uses of a sandbox's network by its programs, by name. They return observations,
// or the name of the error.
var network = map[string]func(argument string) string{
	"connect": func(address string) string { return heard("tcp", address, "") },
	"ask":     func(address string) string { return heard("udp", address, "question") },
	"serve": func(address string) string {
		l, err := net.Listen("tcp", address)
		if err != nil {
			return named(err)
		}
		fmt.Println("serves")
		for {
			c, err := l.Accept()
			if err != nil {
				return named(err)
			}
			_, _ = io.WriteString(c, "from inside")
			_ = c.Close()
		}
	},
	"interfaces": func(string) string {
		entries, err := os.ReadDir("/sys/class/net")
		if err != nil {
			return named(err)
		}
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return strings.Join(names, " ")
	},
	"sys-read-only": func(string) string {
		var fs unix.Statfs_t
		if err := unix.Statfs("/sys", &fs); err != nil {
			return named(err)
		}
		return fmt.Sprint(fs.Flags&unix.ST_RDONLY != 0)
	},
	// The namespaces of the program, in the order that argument has.
	"namespaces": func(names string) string {
		var all []string
		for name := range strings.FieldsSeq(names) {
			to, err := os.Readlink("/proc/self/ns/" + name)
			if err != nil {
				return named(err)
			}
			all = append(all, to)
		}
		return strings.Join(all, " ")
	},
	// Changes of the namespace, for a program with every capability in its own user namespace.
	"link-down":  func(string) string { return named(changeLo(unix.SIOCSIFFLAGS)) },
	"new-mtu":    func(string) string { return named(changeLo(unix.SIOCSIFMTU)) },
	"raw-socket": func(string) string { return named(socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_UDP)) },
	"packet":     func(string) string { return named(socket(unix.AF_PACKET, unix.SOCK_DGRAM, 0)) },
	"netfilter":  func(string) string { return named(flushRules()) },
	"mount-sys": func(string) string {
		fs, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
		if err == nil {
			err = errors.Join(unix.FsconfigCreate(fs), unix.Close(fs))
		}
		return named(err)
	},
	"forwarding": func(string) string { return named(os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0)) },
	"low-port": func(string) string {
		l, err := net.Listen("tcp", "0.0.0.0:2")
		if err == nil {
			err = l.Close()
		}
		return named(err)
	},
}

// named returns the name of an error's number, or "done".
func named(err error) string {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return unix.ErrnoName(errno)
	}
	if err != nil {
		return err.Error()
	}
	return "done"
}

// heard returns what comes from an address, after something was said.
func heard(network, address, say string) string {
	c, err := net.Dial(network, address)
	if err != nil {
		return named(err)
	}
	defer c.Close()
	if say != "" {
		if _, err := io.WriteString(c, say); err != nil {
			return named(err)
		}
	}
	buf := make([]byte, 512)
	n, err := c.Read(buf)
	if err != nil {
		return named(err)
	}
	return string(buf[:n])
}

func socket(family, kind, protocol int) error {
	fd, err := unix.Socket(family, kind, protocol)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// changeLo sets the flags of lo to none, or its MTU to 1280.
func changeLo(what uint) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	r, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	if what == unix.SIOCSIFMTU {
		r.SetUint32(1280)
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(what), uintptr(unsafe.Pointer(r))); errno != 0 {
		return errno
	}
	return nil
}

// flushRules begins and ends a batch of nf_tables that is empty but for its frame, which takes the
// privilege over the namespace.
func flushRules() error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	message := func(kind uint16, flags uint16, resource byte) []byte {
		return []byte{20, 0, 0, 0, byte(kind), byte(kind >> 8), byte(flags), byte(flags >> 8), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, resource}
	}
	batch := message(16, unix.NLM_F_REQUEST, unix.NFNL_SUBSYS_NFTABLES) // NFNL_MSG_BATCH_BEGIN
	batch = append(batch, message(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_DELTABLE, unix.NLM_F_REQUEST|unix.NLM_F_ACK, 0)...)
	batch = append(batch, message(17, unix.NLM_F_REQUEST, unix.NFNL_SUBSYS_NFTABLES)...)
	if err := unix.Sendto(fd, batch, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	buf := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, buf, 0)
	if err != nil {
		return err
	}
	if n < 20 {
		return errors.New("short answer")
	}
	if errno := -*(*int32)(unsafe.Pointer(&buf[16])); errno != 0 {
		return syscall.Errno(errno)
	}
	return nil
}
