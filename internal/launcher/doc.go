// Package launcher is the protocol between the daemon and the launcher, both sides of it.
//
// host_*.go runs in the daemon, launcher_*.go in the launcher, protocol.go is what both agree on.
package launcher
