// Package policy decides about tool calls before they run: allow, deny with a reason, or ask a person or a service.
//
// A [Policy] is rules as data: a YAML file with CEL expressions over [Facts], which say what a call is and what the run
// has spent and done. The first rule that matches decides; where none does, the policy's default. [Parse] checks every
// expression, so that a policy with a mistake never begins to run; one that fails while it is evaluated denies.
//
// What this is not: the wall. A command line can hide what it does (variables, eval, an interpreter's own code), a path
// can lead through a link. Facts says with Opaque where a line could not be read, and a rule can deny those; but what
// holds a program is the sandbox. A policy is for what the sandbox cannot know: what the person wants done.
package policy
