//go:build mutant

package main

// confine does nothing in the launcher that tests are tested with: inherited restrictions would
// hide missing ones of sandboxes.
func confine() error { return nil }
