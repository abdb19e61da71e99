package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// A tap sees the packets of all devices of the daemon's host that open something: packets of TCP
// with SYN and without ACK, and all packets of other protocols. A packet is seen however its
// receiver answers, so that a refused connection counts too.
type tap struct {
	file *os.File
	done chan struct{}
	mark net.Conn // datagrams that end a look

	mu     sync.Mutex // guards those below
	seen   *sync.Cond // opened has changed
	opened map[opened]int
}

// markAt is the destination of the datagrams that a tap sends to itself.
var markAt = opened{protocol: unix.IPPROTO_UDP, to: netip.MustParseAddrPort("127.0.0.99:9")}

// opened is the destination of a packet.
type opened struct {
	protocol int
	to       netip.AddrPort // port 0 if the protocol is neither TCP nor UDP
	answer   bool           // of the nameserver
}

func (o opened) String() string {
	name := map[int]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_ICMP: "icmp", unix.IPPROTO_ICMPV6: "icmp6"}[o.protocol]
	if name == "" {
		name = fmt.Sprintf("protocol %d", o.protocol)
	}
	return name + " " + o.to.String()
}

const (
	tapBytes = 128     // kept of each packet
	tapSpace = 8 << 20 // of the socket
)

// tapFilter is for the packets of a tap; without link header, as SOCK_DGRAM delivers them.
var tapFilter = []bpf.Instruction{
	bpf.LoadAbsolute{Off: 0, Size: 1},
	bpf.ALUOpConstant{Op: bpf.ALUOpShiftRight, Val: 4},
	bpf.JumpIf{Cond: bpf.JumpEqual, Val: 6, SkipTrue: 5},
	// IPv4.
	bpf.LoadAbsolute{Off: 9, Size: 1},
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_TCP, SkipTrue: 8},
	bpf.LoadMemShift{Off: 0},
	bpf.LoadIndirect{Off: 13, Size: 1},
	bpf.Jump{Skip: 3},
	// IPv6, without extension headers: TCP of the kernel has none.
	bpf.LoadAbsolute{Off: 6, Size: 1},
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_TCP, SkipTrue: 3},
	bpf.LoadAbsolute{Off: 53, Size: 1},
	// Flags of TCP: SYN without ACK.
	bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: 0x12},
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: 0x02, SkipTrue: 1},
	bpf.RetConstant{Val: tapBytes},
	bpf.RetConstant{Val: 0},
}

// openTap opens one in the thread's namespace.
func openTap() (*tap, error) {
	const all = unix.ETH_P_ALL>>8 | unix.ETH_P_ALL&0xff<<8
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0) // bound below, with a filter
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	program, err := bpf.Assemble(tapFilter)
	if err != nil {
		return nil, err
	}
	raw := make([]unix.SockFilter, len(program))
	for i, in := range program {
		raw[i] = unix.SockFilter{Code: in.Op, Jt: in.Jt, Jf: in.Jf, K: in.K}
	}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(raw)), Filter: &raw[0]}); err != nil {
		return nil, os.NewSyscallError("setsockopt", err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, tapSpace); err != nil {
		return nil, os.NewSyscallError("setsockopt", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all}); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	t := &tap{file: os.NewFile(uintptr(fd), "tap"), done: make(chan struct{}), opened: make(map[opened]int)}
	t.seen = sync.NewCond(&t.mu)
	if t.mark, err = net.Dial("udp", markAt.to.String()); err != nil {
		return nil, errors.Join(err, t.file.Close())
	}
	go t.read()
	return t, nil
}

func (t *tap) close() {
	_ = t.file.Close() // ends read
	_ = t.mark.Close() // nothing is read from it
	<-t.done
}

// read keeps the destinations. A packet passes lo twice, out and in; both count.
func (t *tap) read() {
	defer close(t.done)
	buf := make([]byte, tapBytes)
	for {
		n, err := t.file.Read(buf)
		if err != nil {
			return
		}
		if o, ok := destination(buf[:n]); ok {
			t.mu.Lock()
			t.opened[o]++
			t.seen.Broadcast()
			t.mu.Unlock()
		}
	}
}

func destination(packet []byte) (o opened, ok bool) {
	var addr, from netip.Addr
	var rest []byte
	switch {
	case len(packet) >= 20 && packet[0]>>4 == 4:
		from, _ = netip.AddrFromSlice(packet[12:16])
		addr, _ = netip.AddrFromSlice(packet[16:20])
		o.protocol, rest = int(packet[9]), packet[min(len(packet), int(packet[0]&15)*4):]
	case len(packet) >= 40 && packet[0]>>4 == 6:
		addr, _ = netip.AddrFromSlice(packet[24:40])
		o.protocol, rest = int(packet[6]), packet[40:]
		if addr.IsLinkLocalMulticast() && (o.protocol == unix.IPPROTO_ICMPV6 || o.protocol == unix.IPPROTO_HOPOPTS) {
			return o, false // the veth looks for neighbours and routers, and tells of its groups
		}
	default:
		return o, false
	}
	port := uint16(0)
	if (o.protocol == unix.IPPROTO_TCP || o.protocol == unix.IPPROTO_UDP) && len(rest) >= 4 {
		port = binary.BigEndian.Uint16(rest[2:])
		o.answer = from.String() == resolverAt && binary.BigEndian.Uint16(rest) == 53
	}
	o.to = netip.AddrPortFrom(addr, port)
	return o, true
}

// take returns the destinations since the last call. A packet is queued for the tap before the call
// that sends it returns, so all those before this call are among them.
func (t *tap) take() (map[opened]int, error) {
	for {
		_, err := t.mark.Write(nil)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.ECONNREFUSED) { // the answer to an earlier mark, in the place of this one
			return nil, fmt.Errorf("mark: %w", err)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for t.opened[markAt] == 0 {
		t.seen.Wait()
	}
	all := t.opened
	t.opened = make(map[opened]int)
	delete(all, markAt)
	for o := range all { // answers to the mark
		if o.protocol == unix.IPPROTO_ICMP && o.to.Addr().IsLoopback() {
			delete(all, o)
		}
	}
	if n, err := t.lost(); err != nil || n > 0 {
		return nil, fmt.Errorf("the tap lost %d packets, %w", n, err)
	}
	return all, nil
}

// lost returns the number of packets that had no space.
func (t *tap) lost() (n uint32, err error) {
	raw, err := t.file.SyscallConn()
	if err != nil {
		return 0, err
	}
	ctrl := raw.Control(func(fd uintptr) {
		stats, statsErr := unix.GetsockoptTpacketStats(int(fd), unix.SOL_PACKET, unix.PACKET_STATISTICS)
		if statsErr != nil {
			err = statsErr
			return
		}
		n = stats.Drops
	})
	if ctrl != nil {
		return 0, ctrl
	}
	return n, err
}
