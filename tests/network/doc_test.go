// Package network tests the network of sandboxes from end to end: programs inside, the gateway, and
// an Internet that the tests make.
//
// The Internet is a network namespace in which every address of both families is local. The host of
// the daemon is another namespace, which a veth joins to it. A server of a test answers at its
// address and port. All other addresses have canaries on the same ports, which record each byte; so
// has the host itself. A tap on the host records each packet that opens something. A test reaches
// nothing outside of the two namespaces, whatever the daemon lets through.
//
// Root makes the namespaces. The daemon runs there as root, and as an ordinary user.
package network
