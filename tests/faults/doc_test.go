// Package faults has many clients use one daemon at once, and kills it, its launcher or a sandbox's init in the midst of it:
// nothing that was answered may be lost, nothing may be left, and what is lost is said.
package faults
