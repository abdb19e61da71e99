// Package security attacks sandboxes of the built daemon, one test per claim of SECURITY.md.
//
// Every attack has a control: the same attempt where the layer that should stop it is off. An attack whose control
// does not work on this machine proves nothing and is skipped, with what the control said.
package security
