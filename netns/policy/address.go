package policy

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// special lists the special-purpose ranges: the registries of RFC 6890 as of 2026, and site-local
// addresses. Their order does not matter: ranges that overlap are of one kind.
var special = []struct {
	kind   kind
	prefix netip.Prefix
	name   string
}{
	{never, netip.MustParsePrefix("0.0.0.0/8"), "unspecified"},
	{private, netip.MustParsePrefix("10.0.0.0/8"), "private"},
	{private, netip.MustParsePrefix("100.64.0.0/10"), "shared"},
	{never, netip.MustParsePrefix("127.0.0.0/8"), "loopback"},
	{private, netip.MustParsePrefix("169.254.0.0/16"), "link-local"},
	{private, netip.MustParsePrefix("172.16.0.0/12"), "private"},
	{private, netip.MustParsePrefix("192.0.0.0/24"), "protocol assignments"},
	{private, netip.MustParsePrefix("192.0.2.0/24"), "documentation"},
	{private, netip.MustParsePrefix("192.88.99.0/24"), "6to4 relay"},
	{private, netip.MustParsePrefix("192.168.0.0/16"), "private"},
	{private, netip.MustParsePrefix("198.18.0.0/15"), "benchmarking"},
	{private, netip.MustParsePrefix("198.51.100.0/24"), "documentation"},
	{private, netip.MustParsePrefix("203.0.113.0/24"), "documentation"},
	{never, netip.MustParsePrefix("224.0.0.0/4"), "multicast"},
	{never, netip.MustParsePrefix("240.0.0.0/4"), "reserved"},
	{private, netip.MustParsePrefix("2001::/23"), "protocol assignments"}, // Teredo and ORCHID are within
	{private, netip.MustParsePrefix("2001:db8::/32"), "documentation"},
	{private, netip.MustParsePrefix("2002::/16"), "6to4"},
	{private, netip.MustParsePrefix("3fff::/20"), "documentation"},
	{private, netip.MustParsePrefix("fc00::/7"), "private"},
	{private, netip.MustParsePrefix("fe80::/10"), "link-local"},
	{private, netip.MustParsePrefix("fec0::/10"), "site-local"},
	{never, netip.MustParsePrefix("ff00::/8"), "multicast"},
}

// metadata are the addresses at which clouds hand credentials to any program that asks.
var metadata = []netip.Addr{
	netip.MustParseAddr("169.254.169.254"),
	netip.MustParseAddr("169.254.170.2"),   // tasks of ECS
	netip.MustParseAddr("169.254.170.23"),  // pods of EKS
	netip.MustParseAddr("100.100.100.200"), // Alibaba
	netip.MustParseAddr("192.0.0.192"),     // Oracle
	netip.MustParseAddr("168.63.129.16"),   // Azure; a public address that only its hosts answer
	netip.MustParseAddr("fd00:ec2::254"),
	netip.MustParseAddr("fd00:ec2::23"),
	netip.MustParseAddr("fd20:ce::254"), // Google
}

var (
	globalUnicast = netip.MustParsePrefix("2000::/3")
	nat64         = netip.MustParsePrefix("64:ff9b::/96") // RFC 6052
)

// kind is the kind of rule that an address needs.
type kind int

const (
	public       kind = iota // any rule that covers it
	private                  // a CIDR within a special-purpose range
	metadataOnly             // a rule for this one address
	hostOnly                 // a rule for HostName
	never
)

// canonical returns the address that a connection to addr reaches: the IPv4 address behind a mapped
// or NAT64 form. It is the zero Addr if addr has a zone.
func canonical(addr netip.Addr) netip.Addr {
	if addr.Zone() != "" {
		return netip.Addr{}
	}
	if addr = addr.Unmap(); nat64.Contains(addr) {
		b := addr.As16()
		return netip.AddrFrom4([4]byte(b[12:]))
	}
	return addr
}

// classify returns the kind of a canonical address and the name of its range.
func classify(addr netip.Addr) (kind, string) {
	if !addr.IsValid() {
		return never, "invalid"
	}
	if slices.Contains(metadata, addr) {
		return metadataOnly, "metadata"
	}
	if addr == HostAddress {
		return hostOnly, "the address of the host's services"
	}
	for _, s := range special {
		if s.prefix.Contains(addr) {
			return s.kind, s.name
		}
	}
	switch {
	case addr.Is4():
		return public, "public"
	case !globalUnicast.Contains(addr):
		return never, "reserved" // ::1, :: and IPv4-compatible forms among them
	case isatap(addr):
		return never, "ISATAP"
	default:
		return public, "public"
	}
}

// isatap reports whether the interface identifier embeds an IPv4 address (RFC 5214 section 6.1): a
// host with such an interface tunnels to that address.
func isatap(addr netip.Addr) bool {
	b := addr.As16()
	return binary.BigEndian.Uint32(b[8:])&^0x02000000 == 0x00005efe
}

// IsPublic reports whether rules for names open an address, in whatever form it is written.
func IsPublic(addr netip.Addr) bool {
	k, _ := classify(canonical(addr))
	return k == public
}

// openedBy reports whether a rule's prefix opens an address of the kind, given that it contains it.
func (k kind) openedBy(p netip.Prefix) bool {
	switch k {
	case public:
		return true
	case private:
		for _, s := range special {
			if s.kind == private && s.prefix.Bits() <= p.Bits() && s.prefix.Contains(p.Addr()) {
				return true
			}
		}
		return false
	case metadataOnly:
		return p.IsSingleIP()
	case hostOnly, never:
		return false
	}
	return false
}

// closed reports whether every address of a prefix is refused whatever the rules say.
func closed(p netip.Prefix) bool {
	if p.Addr().Is6() && p.Overlaps(globalUnicast) {
		return false
	}
	for _, s := range special {
		switch {
		case s.kind == never && s.prefix.Bits() <= p.Bits() && s.prefix.Contains(p.Addr()):
			return true
		case s.kind != never && s.prefix.Overlaps(p):
			return false
		}
	}
	return p.Addr().Is6()
}
