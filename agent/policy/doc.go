// Package policy decides about tool calls before they run: it allows them, denies them with a
// reason, or asks a person or a service.
//
// A [Policy] is rules as data: a YAML file with CEL expressions over [Facts], which describe the
// call, the run's spending and its earlier calls. The first rule that matches decides, and if none
// matches, the policy's default. [Parse] checks every expression, so that a run never begins with a
// broken policy. A rule that fails while it is evaluated denies.
//
// A policy is no security boundary; the sandbox is. A command line can hide its effects behind
// variables, eval or an interpreter's own code, and a path can lead through a symbolic link.
// Facts.Opaque marks lines that could not be read in full, and a rule can deny those. Use a policy
// for intentions that the sandbox does not know: which of its freedoms a run may use.
package policy
