// Package bench has a model solve the problems of a task, each in a sandbox of its own or by a
// single answer, and scores the answers.
//
// A [Task] is a directory with a config.yaml (prompts and the sandbox's directories), a file of
// problems, and a scoring method. The keys are those of LLM-in-Sandbox, whose tasks work
// unchanged. Their Python files, reward.py and vanilla_llm_prompt.py, run in sandboxes, never on
// the host. All files of a task lie in its directory.
//
// [Run] distributes the problems to workers. Each problem is a run of the agent. Like the agent,
// the package is a client of the daemon's socket.
//
// # Records
//
// bench.jsonl is a benchmark's record, one line an event, appended and synced: a problem was
// answered, with the answer; an answer was scored. The turns are in the records of the runs, below
// runs/. So no request is repeated after a kill -9. A scored problem is done, an answered one is
// scored, and an open one is resumed in its sandbox. results.json and trajectory.json are derived
// from these.
//
// # Failures
//
// A failure of the model, or of its provider for one problem, scores 0, as in LLM-in-Sandbox. A
// failure that concerns all problems stops the benchmark, which can be resumed: a refused key, or
// a daemon that cannot create sandboxes.
package bench
