// Package netns makes the network namespaces of sandboxes that have a network.
//
// A namespace has one device, lo, so that no packet leaves it. Every address is local there, by a
// route, and rules of nf_tables give packets for addresses outside to three sockets. The kernel is
// the other end of each connection; the gateway, a process outside, holds the sockets:
//
//	program ── connect 1.2.3.4:443 ──▶ lo ── tproxy ──▶ Stream    the accepted connection's local address is 1.2.3.4:443
//	        ── UDP to 1.2.3.4:53 ────▶ lo ── tproxy ──▶ DNS       the control message has 1.2.3.4, the answer comes from there
//	        ── TCP to 1.2.3.4:53 ────▶ lo ── tproxy ──▶ DNSTCP
//	        ── other UDP ────────────▶ lo ── reject               ICMP port unreachable, ECONNREFUSED
//	        ── other protocols ──────▶ lo ── reject               ICMP administratively prohibited
//	        ── 127.0.0.1, ::1, own ──▶ lo ── accept               programs among themselves
//
// The caller of [Make] is root of a user namespace, to which the network namespace then belongs. A
// sandbox has another user namespace below that one: with every capability there it changes
// nothing here. It cannot bind the sockets' ports either, which are privileged; those are the only
// privileged ports there are. Its own servers use all others, port 53 and 80 among them.
//
// [Make] follows a plan, which is one value, and reads the kernel's state back before it returns:
// what differs is an error. decisions/0022 has the reasons and the figures.
package netns
