// Package security attacks sandboxes of the built daemon, one test per claim of SECURITY.md.
//
// Every attack has a control: the same attempt without the layer that should stop it. An attack
// whose control does not work on this machine proves nothing, and is skipped with the control's
// reason.
package security
