// Package policy decides which connections, names and requests of a sandbox leave it.
//
// A policy is a pure value: [Parse] reads and checks a document, and the decisions depend on
// nothing else. It opens no socket and reads no clock, so that the same document gives the same
// answer in the gateway, in a test of recorded flows and in a comparison of two policies.
//
// Rules have no order:
//
//   - What no rule allows is refused.
//   - A rule that denies wins over every rule that allows.
//   - A special-purpose address (private, link-local, shared, documentation, …) is refused unless a
//     rule names a CIDR inside of such a range. A rule for a name or for 0.0.0.0/0 never opens it.
//   - A metadata address of a cloud is refused unless a rule names exactly that address.
//   - The host's own services are ports of [HostName] that a rule or a service names one by one.
//   - Loopback, multicast, unspecified and reserved addresses are always refused.
//
// A rule that allows may have a [Budget] of all that it covers ([Policy.Charged]). Who keeps count
// refuses what exceeds one as if the rule denied it.
//
// Three questions follow each other for one request, and each is asked of the same rules: may the
// name be resolved ([Policy.Resolve]), may the address be connected to ([Policy.Connect]), and may
// this request be sent ([Policy.Request]). A connection is allowed by the name that its address was
// resolved for, never by a name that the client sends later; the gateway compares the two.
//
// [Learn] writes the policy that a record of flows needs, [Policy.Recorded] decides about a record
// anew, [Replay] counts one in budgets, and [Widens] compares two policies without one.
//
// Hostile input is parsed once into [Name] and [Path]; both refuse every form that two programs
// could read differently.
package policy
