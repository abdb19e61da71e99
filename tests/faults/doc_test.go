// Package faults has many clients use one daemon at once, and kills it, its launcher or a
// sandbox's init meanwhile. Nothing acknowledged may be lost, nothing may be left over, and a lost
// sandbox says so.
package faults
