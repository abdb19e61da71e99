// Package codepolicy judges source text before it runs: documents with patterns and restricted
// modules, readers of the imports of each language, findings. It is a pure value; the service runs
// what needs a process.
//
// It is a seat belt. A text that hides its intent passes, and what holds a program is the sandbox.
// Readers are lexical, in Go, without recursion: they read hostile text in the daemon.
package codepolicy
