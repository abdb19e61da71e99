// Package network tests the network of sandboxes from end to end: programs inside, the gateway, and
// an Internet that the tests make.
//
// The Internet is a network namespace in which every address of both families is local. The host of
// the daemon is another one, which a veth joins to it. What a test serves at an address and port
// answers; everything else on those ports is a canary, which records each byte, and so are those
// ports of the host itself. A tap on the host records each packet that opens something. A test
// reaches nothing outside of the two, whatever the daemon lets through.
//
// Root makes the namespaces. The daemon runs there as root, and as an ordinary user.
package network
