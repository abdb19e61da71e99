// Package systemd embeds the example units for tests/limits, which runs them on a machine without a
// source tree.
package systemd

import _ "embed"

// System is the unit of a root daemon.
//
//go:embed sandboxd.service
var System string

// User is the unit of an unprivileged user's daemon.
//
//go:embed user/sandboxd.service
var User string
