// Package bench has a model solve the problems of a task, each in a sandbox of its own or by one answer alone, and scores what it
// answers.
//
// A [Task] is a directory: config.yaml with prompts and the sandbox's directories, a file of problems, and how answers are scored.
// The keys are those of LLM-in-Sandbox, whose tasks can be used as they are: their Python files, reward.py and
// vanilla_llm_prompt.py, run in sandboxes, never here. All that a task names lies in its directory.
//
// [Run] gives the problems to workers. Like the agent, of which each problem is a run, the package is a client of the daemon's
// socket.
//
// # What is kept
//
// bench.jsonl is a benchmark's record, one line an event, only ever appended and synced: that a problem was answered, and with what;
// that an answer was scored. The turns in between are in the records of the runs, below runs/. So after a kill -9 nothing is
// asked twice: a problem that was scored is done, one that was answered is scored, and one that was being worked on is resumed in the
// sandbox as it is. results.json and trajectory.json follow from these.
//
// # Whose fault it is
//
// What is the model's, or its provider's for one problem, is a score of 0, as in the original. What is nobody's answer, such as a key that is
// refused or a daemon that cannot make sandboxes, stops the benchmark, which can be resumed.
package bench
