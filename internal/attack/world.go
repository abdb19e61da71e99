package attack

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// Ports that [Everything] answers on. dnsPorts answer questions of DNS only.
var (
	streamPorts   = []int{1, servicePort, 22, 80, 443, 853}
	datagramPorts = []int{123, 443, 5353}
	dnsPorts      = []int{1, 53}
)

// World is a network namespace in which everything answers.
type World struct{ open []io.Closer }

// Everything fills the calling thread's network namespace, which must be new: every address is
// local, and servers answer at all of them. Attacks of [Egress] work there. A gateway that lets one
// pass lets it reach an answer there.
func Everything() (*World, error) {
	w := new(World)
	if err := w.fill(); err != nil {
		return nil, errors.Join(fmt.Errorf("make a network in which everything answers: %w", err), w.Close())
	}
	return w, nil
}

// Close ends the servers.
func (w *World) Close() error {
	var errs []error
	for _, c := range w.open {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

func (w *World) fill() error {
	if err := allLocal(); err != nil {
		return err
	}
	listen := new(net.ListenConfig)
	for _, port := range streamPorts {
		l, err := listen.Listen(context.Background(), "tcp", ":"+strconv.Itoa(port))
		if err != nil {
			return err
		}
		w.open = append(w.open, l)
		go Answer(l)
	}
	l, err := listen.Listen(context.Background(), "unix", abstractName())
	if err != nil {
		return err
	}
	w.open = append(w.open, l)
	go Answer(l)
	// DNS over TCP: a length, then a message.
	if l, err = listen.Listen(context.Background(), "tcp", ":53"); err != nil {
		return err
	}
	w.open = append(w.open, l)
	go serve(l, answerStreamedQuestion)
	for _, port := range datagramPorts {
		if err := w.receive(listen, port, func([]byte) []byte { return greeting }); err != nil {
			return err
		}
	}
	for _, port := range dnsPorts {
		if err := w.receive(listen, port, answerQuestion); err != nil {
			return err
		}
	}
	return nil
}

// greeting is the answer of every server.
var greeting = []byte("reached\n")

// allLocal gives the namespace lo, the addresses of a sandbox and routes by which every address is
// local, as package netns does.
func allLocal() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	up, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	up.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, up); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	for _, own := range []netip.Prefix{netip.MustParsePrefix("192.0.2.1/32"), netip.MustParsePrefix("2001:db8::1/128")} {
		kind := byte(unix.AF_INET)
		if own.Addr().Is6() {
			kind = unix.AF_INET6
		}
		err := routeRequest(unix.RTM_NEWADDR, []byte{kind, byte(own.Bits()), unix.IFA_F_NODAD, unix.RT_SCOPE_HOST, loopbackIndex, 0, 0, 0},
			attribute(unix.IFA_LOCAL, own.Addr().AsSlice()), attribute(unix.IFA_ADDRESS, own.Addr().AsSlice()))
		if err != nil {
			return fmt.Errorf("add address %s: %w", own, err)
		}
		if err := changeRoute(unix.RTM_NEWROUTE, kind); err != nil {
			return fmt.Errorf("add route of %s: %w", own, err)
		}
	}
	return nil
}

// Answer accepts connections until the listener is closed, and answers the first bytes of each.
func Answer(l net.Listener) {
	serve(l, func(c net.Conn) {
		request := make([]byte, 4096)
		n, err := c.Read(request)
		if err != nil {
			return
		}
		answer := greeting
		if bytes.Contains(request[:n], []byte("HTTP/")) {
			answer = []byte(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(greeting), greeting))
		}
		_, _ = c.Write(answer) // a client that is gone needs none
	})
}

func serve(l net.Listener, one func(net.Conn)) {
	for {
		c, err := l.Accept()
		if err != nil {
			return // closed
		}
		go func() {
			one(c)
			_ = c.Close()
		}()
	}
}

// receive answers datagrams to a port at every address, multicast and broadcast included.
func (w *World) receive(listen *net.ListenConfig, port int, answer func([]byte) []byte) error {
	for _, network := range []string{"udp4", "udp6"} {
		p, err := listen.ListenPacket(context.Background(), network, ":"+strconv.Itoa(port))
		if err != nil {
			return err
		}
		w.open = append(w.open, p)
		if err := joinGroups(p); err != nil {
			return err
		}
		go func() {
			request := make([]byte, 4096)
			for {
				n, from, err := p.ReadFrom(request)
				if errors.Is(err, net.ErrClosed) {
					return
				}
				if err == nil {
					_, _ = p.WriteTo(answer(request[:n]), from) // a client that is gone needs none
				}
			}
		}()
	}
	return nil
}

// joinGroups makes the socket one of the groups that attacks send to.
func joinGroups(p net.PacketConn) error {
	u, ok := p.(*net.UDPConn)
	if !ok {
		return fmt.Errorf("a socket of %T", p)
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		if strings.HasPrefix(p.LocalAddr().String(), "0.0.0.0") {
			failed = unix.SetsockoptIPMreqn(int(fd), unix.IPPROTO_IP, unix.IP_ADD_MEMBERSHIP,
				&unix.IPMreqn{Multiaddr: [4]byte{224, 0, 0, 251}, Ifindex: loopbackIndex})
			return
		}
		failed = unix.SetsockoptIPv6Mreq(int(fd), unix.IPPROTO_IPV6, unix.IPV6_JOIN_GROUP,
			&unix.IPv6Mreq{Multiaddr: netip.MustParseAddr("ff02::fb").As16(), Interface: loopbackIndex})
	})
	return errors.Join(err, failed)
}

func answerStreamedQuestion(c net.Conn) {
	packet := make([]byte, 1024)
	n, err := c.Read(packet)
	if err != nil {
		return
	}
	answer := answerQuestion(packet[min(n, 2):n]) // behind its length; other bytes than a question get an answer too
	_, _ = c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...))
}

// answerQuestion answers any question of DNS with a record.
func answerQuestion(packet []byte) []byte {
	var m dnsmessage.Message
	if err := m.Unpack(packet); err != nil || len(m.Questions) != 1 {
		return greeting
	}
	q := m.Questions[0]
	header := dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 1}
	var body dnsmessage.ResourceBody = &dnsmessage.TXTResource{TXT: []string{"reached"}}
	switch q.Type { //nolint:exhaustive // all others get a text
	case dnsmessage.TypeA:
		body = &dnsmessage.AResource{A: [4]byte{1, 1, 1, 1}}
	case dnsmessage.TypeAAAA:
		body = &dnsmessage.AAAAResource{AAAA: netip.MustParseAddr("2606:4700::1111").As16()}
	case dnsmessage.TypeCNAME:
		body = &dnsmessage.CNAMEResource{CNAME: q.Name}
	case dnsmessage.TypePTR:
		body = &dnsmessage.PTRResource{PTR: q.Name}
	case dnsmessage.TypeMX:
		body = &dnsmessage.MXResource{MX: q.Name}
	}
	m.Response, m.RecursionAvailable, m.Additionals = true, true, nil
	m.Answers = []dnsmessage.Resource{{Header: header, Body: body}}
	answer, err := m.Pack()
	if err != nil {
		return greeting
	}
	return answer
}
