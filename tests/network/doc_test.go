// Package network tests the network of sandboxes from end to end: programs inside, the gateway, and
// an Internet that the tests make.
//
// The Internet is a network namespace with a daemon in it. Every address of both families is local
// there. What a test serves at an address and port answers; everything else on those ports is a
// canary, which records each byte. A tap records each packet that opens something. A test reaches
// nothing outside of the namespace, whatever the daemon lets through.
//
// Root makes the namespace. The daemon runs in it as root, and as an ordinary user.
package network
