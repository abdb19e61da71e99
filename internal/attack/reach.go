package attack

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"unsafe"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// Seconds that an attack waits for an answer. Refusals come at once; a packet that is dropped costs
// the whole time.
const (
	streamPatience   = 3
	datagramPatience = 1
)

// sockaddr returns an address for the family of its form: that of IPv6 for a mapped one.
func sockaddr(at netip.AddrPort) unix.Sockaddr {
	if at.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	}
	to := &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}
	if at.Addr().Zone() != "" {
		to.ZoneId = loopbackIndex
	}
	return to
}

func family(at netip.AddrPort) int {
	if at.Addr().Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// socketTo returns a socket for an address, whose calls wait a bounded time.
func socketTo(at netip.AddrPort, kind, protocol int, seconds int64) (int, error) {
	fd, err := unix.Socket(family(at), kind|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return -1, err
	}
	patience := &unix.Timeval{Sec: seconds}
	err = errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, patience),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, patience))
	if err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// again repeats a call that a signal of Go's runtime has interrupted.
func again[T any](f func() (T, error)) (T, error) {
	for {
		v, err := f()
		if !errors.Is(err, unix.EINTR) {
			return v, err
		}
	}
}

func connect(fd int, to netip.AddrPort) error {
	_, err := again(func() (any, error) { return nil, unix.Connect(fd, sockaddr(to)) })
	if errors.Is(err, unix.EISCONN) { // of the second call
		return nil
	}
	return err
}

// reach connects, sends a request, and returns nil if a server answers it.
func reach(to string, request []byte, prepare ...func(fd int) error) error {
	return reachBy(to, 0, request, prepare...)
}

func reachBy(to string, protocol int, request []byte, prepare ...func(fd int) error) error {
	at, err := netip.ParseAddrPort(to)
	if err != nil {
		return err
	}
	fd, err := socketTo(at, unix.SOCK_STREAM, protocol, streamPatience)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for _, p := range prepare {
		if err := p(fd); err != nil {
			return err
		}
	}
	if err := connect(fd, at); err != nil {
		return err
	}
	return exchange(fd, request)
}

// exchange sends a request, and returns nil if a server answers it.
func exchange(fd int, request []byte) error {
	if _, err := again(func() (int, error) { return unix.SendmsgN(fd, request, nil, nil, unix.MSG_NOSIGNAL) }); err != nil {
		return err
	}
	return heard(fd)
}

func heard(fd int) error {
	answer := make([]byte, 4096)
	n, err := again(func() (int, error) { return unix.Read(fd, answer) })
	switch {
	case err != nil:
		return err
	case n == 0:
		return errNothing
	default:
		return gatewaysRefusal(answer[:n])
	}
}

// accepted connects, and returns nil if that was accepted.
func accepted(to string, prepare ...func(fd int) error) error {
	at, err := netip.ParseAddrPort(to)
	if err != nil {
		return err
	}
	fd, err := socketTo(at, unix.SOCK_STREAM, 0, streamPatience)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for _, p := range prepare {
		if err := p(fd); err != nil {
			return err
		}
	}
	return connect(fd, at)
}

// fastOpen sends data with the first packet of a connection.
func fastOpen() error {
	at := netip.MustParseAddrPort("10.0.0.1:80")
	fd, err := socketTo(at, unix.SOCK_STREAM, 0, streamPatience)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if _, err := again(func() (int, error) {
		return unix.SendmsgN(fd, plain, nil, sockaddr(at), unix.MSG_FASTOPEN|unix.MSG_NOSIGNAL)
	}); err != nil {
		return err
	}
	return heard(fd)
}

// exchangeDatagram sends a datagram and returns the answer, from any address. The socket hears ICMP
// errors.
func exchangeDatagram(at netip.AddrPort, request []byte) ([]byte, error) {
	fd, err := socketTo(at, unix.SOCK_DGRAM, 0, datagramPatience)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	err = errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_RECVERR, 1), unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BROADCAST, 1))
	if family(at) == unix.AF_INET6 {
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1))
	}
	if err != nil {
		return nil, err
	}
	if _, err := again(func() (any, error) { return nil, unix.Sendto(fd, request, 0, sockaddr(at)) }); err != nil {
		return nil, err
	}
	answer := make([]byte, 4096)
	n, err := again(func() (int, error) {
		n, _, err := unix.Recvfrom(fd, answer, 0)
		return n, err
	})
	if err != nil {
		return nil, err
	}
	return answer[:n], nil
}

// ask sends a datagram, and returns nil if it is answered.
func ask(to string, request []byte) error {
	at, err := netip.ParseAddrPort(to)
	if err != nil {
		return err
	}
	_, err = exchangeDatagram(at, request)
	return err
}

// question returns a question of DNS.
func question(host string, t dnsmessage.Type) ([]byte, error) {
	name, err := dnsmessage.NewName(host)
	if err != nil {
		return nil, err
	}
	m := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: 4242, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: name, Type: t, Class: dnsmessage.ClassINET}},
	}
	return m.Pack()
}

// resolve asks a server of DNS, and returns nil if it answers with a record.
func resolve(server netip.AddrPort, kind int, host string, t dnsmessage.Type) error {
	packet, err := question(host, t)
	if err != nil {
		return err
	}
	var answer []byte
	if kind == unix.SOCK_DGRAM {
		answer, err = exchangeDatagram(server, packet)
	} else {
		answer, err = exchangeStream(server, packet)
	}
	if err != nil {
		return err
	}
	var m dnsmessage.Message
	if err := m.Unpack(answer); err != nil {
		return fmt.Errorf("read the answer: %w", err)
	}
	if m.RCode != dnsmessage.RCodeSuccess || len(m.Answers) == 0 {
		return fmt.Errorf("answered %v with %d records", m.RCode, len(m.Answers))
	}
	return nil
}

// answered asks a server of DNS, and returns nil if it answers at all.
func answered(server netip.AddrPort) error {
	packet, err := question(attackedName, dnsmessage.TypeA)
	if err != nil {
		return err
	}
	_, err = exchangeDatagram(server, packet)
	return err
}

// exchangeStream asks a question of DNS over TCP.
func exchangeStream(server netip.AddrPort, packet []byte) ([]byte, error) {
	fd, err := socketTo(server, unix.SOCK_STREAM, 0, streamPatience)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if err := connect(fd, server); err != nil {
		return nil, err
	}
	framed := append(binary.BigEndian.AppendUint16(nil, uint16(len(packet))), packet...)
	if _, err := again(func() (int, error) { return unix.SendmsgN(fd, framed, nil, nil, unix.MSG_NOSIGNAL) }); err != nil {
		return nil, err
	}
	var all []byte
	for {
		part := make([]byte, 4096)
		n, err := again(func() (int, error) { return unix.Read(fd, part) })
		switch {
		case err != nil:
			return nil, err
		case n == 0:
			return nil, errNothing
		}
		if all = append(all, part[:n]...); len(all) >= 2 && len(all) >= 2+int(binary.BigEndian.Uint16(all)) {
			return all[2 : 2+int(binary.BigEndian.Uint16(all))], nil
		}
	}
}

// ping sends an echo request: over a socket of its own kind, which no privilege is needed for where
// the host lets its users, else over a raw one.
func ping(family int, to string) error {
	at := netip.MustParseAddrPort(to)
	protocol, request := unix.IPPROTO_ICMP, []byte{8, 0, 0xf7, 0xfd, 0, 1, 0, 1} // with its checksum
	if family == unix.AF_INET6 {
		protocol, request = unix.IPPROTO_ICMPV6, []byte{128, 0, 0, 0, 0, 1, 0, 1} // the kernel fills it in
	}
	fd, err := socketTo(at, unix.SOCK_DGRAM, protocol, datagramPatience)
	if err != nil {
		var rawErr error
		if fd, rawErr = socketTo(at, unix.SOCK_RAW, protocol, datagramPatience); rawErr != nil {
			return err
		}
	}
	defer unix.Close(fd)
	if err := connect(fd, at); err != nil {
		return err
	}
	if _, err := again(func() (int, error) { return unix.Write(fd, request) }); err != nil {
		return err
	}
	// Where all addresses are local, a raw socket first receives the request itself.
	for range 4 {
		answer := make([]byte, 128)
		n, err := again(func() (int, error) { return unix.Read(fd, answer) })
		if err != nil {
			return err
		}
		if answer = answer[:n]; n > 20 && answer[0]>>4 == 4 {
			answer = answer[20:]
		}
		if len(answer) > 0 && (answer[0] == 0 || answer[0] == 129) {
			return nil
		}
	}
	return errNothing
}

// bind takes a port of the gateway's sockets.
func bind(kind int, to string) error {
	at := netip.MustParseAddrPort(to)
	fd, err := socketTo(at, kind, 0, streamPatience)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return err
	}
	if err := unix.Bind(fd, sockaddr(at)); err != nil {
		return err
	}
	if kind == unix.SOCK_STREAM {
		return unix.Listen(fd, 1)
	}
	return nil
}

// clientHello returns the first bytes of TLS to a server, without a server name if name is empty.
func clientHello(name string) []byte {
	ours, theirs := net.Pipe()
	go func() {
		_ = tls.Client(ours, &tls.Config{ServerName: name, InsecureSkipVerify: true}).Handshake() //nolint:noctx // it never comes to a certificate
	}()
	head := make([]byte, 5)
	if _, err := io.ReadFull(theirs, head); err != nil {
		panic(err) // the client writes first
	}
	body := make([]byte, binary.BigEndian.Uint16(head[3:]))
	if _, err := io.ReadFull(theirs, body); err != nil {
		panic(err)
	}
	_ = theirs.Close() // ends the client
	return append(head, body...)
}

func address(b *byte) uintptr { return uintptr(unsafe.Pointer(b)) }
