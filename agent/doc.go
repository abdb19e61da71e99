// Package agent runs a language model's tool calls in a sandbox until the model submits.
//
// [Run] performs a whole run: it makes the output directory, creates a sandbox, copies the input
// into it, takes turns, collects the output and deletes the sandbox. The package is an ordinary
// client of the daemon's socket: it reaches the sandbox through the API, never through the host.
//
// # A turn
//
// The model receives the conversation so far and answers with text and any number of tool calls.
// Each call is parsed, decided on by the run's [policy.Policy], run, and answered under its ID, in
// order. Consecutive read-only calls run concurrently. A defective or denied call is answered with
// the error, because the model can correct it: an unknown tool, invalid JSON, a missing or an
// extra argument. A turn without a tool call is answered with a reminder; after [MaxIdleTurns]
// such turns in a row the run ends. Every turn counts as a step and is on disk before the next
// begins.
//
// # The record
//
// A run is a sequence of [Event]s, appended to one file. The state of a run, conversation
// included, is derived from its events by one piece of code, for the process that writes them as
// for later readers: [Resume], [Fork], [ReplayRun] and [LoadRun]. So a crash at any instant loses
// no completed work, and work of unknown outcome is recorded as such. trajectory.json is derived
// from the record too, once, at the end of the run.
//
// # How a run ends
//
// See [ExitReason] and [Budget]. For every reason the output is collected and the sandbox deleted.
// Only an interrupted run can keep its sandbox, stopped, for a resume ([Options.KeepInterrupted]).
//
// # Trust
//
// The model's arguments are untrusted. They are parsed once, strictly, and the parsed value is
// both the one that the policy sees and the one that runs. They reach programs as argv, and files
// through the files API, never through a shell line that we build. The exception is execute_bash,
// whose purpose is to run the model's own line in the sandbox's shell.
//
// The sandbox's answers are untrusted and bounded. Its archive is extracted with [os.Root], and
// links in it are kept as links and never followed.
package agent
