// Package systemd holds the example units for the test that runs them (tests/limits), on a machine that has no source tree.
package systemd

import _ "embed"

// System is the unit of root's daemon.
//
//go:embed sandboxd.service
var System string

// User is the unit of an ordinary user's daemon.
//
//go:embed user/sandboxd.service
var User string
