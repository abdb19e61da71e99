// Package agent runs a language model's tool calls in a sandbox until the model submits.
//
// [Run] is the whole life of one run: make the output directory, create a sandbox, copy the input into it, take turns,
// collect the output, delete the sandbox. The package is a client of the daemon's socket like every other: it sees a
// [Sandbox] through the API and never the host's side of it.
//
// # A turn
//
// The model gets the conversation so far and answers with text and any number of tool calls. Each is read, decided about by the
// run's [policy.Policy], run and answered under its id, in the order in which they stand; calls that change nothing and follow
// one another run at the same time. An unknown tool, arguments that are not JSON, arguments missing or too many, a denial are
// answered with the error, because the model can mend what it is told. A turn without a tool call is answered with a reminder; after
// [MaxIdleTurns] such turns in a row the run ends. Every turn counts as a step and is on disk before the next begins.
//
// # The record
//
// What happens is a sequence of [Event]s, appended to one file. All that is known about a run, the conversation included, is what
// they add up to, and the same code adds them up in the process that writes them and in one that reads them later: [Resume],
// [Fork], [ReplayRun], [LoadRun] and trajectory.json need no second account. So a crash at any instant loses nothing that had happened,
// and what may or may not have happened is known to be so.
//
// # How a run ends
//
// See [ExitReason] and [Budget]. Whatever the reason, the output is collected and the sandbox deleted. Only after an interrupt it can
// be left, stopped, to go on in ([Options.KeepInterrupted]).
//
// # What is not trusted
//
// The model's arguments: they are read once, strictly, and what was read is what the policy sees and what runs. They reach
// programs as argv and files through the files API, never through a shell line that we build (execute_bash hands the
// model's own line to the sandbox's shell: that is its purpose). The sandbox's answers: bounded, and its archive is
// extracted with [os.Root], links kept as links and never followed.
package agent
