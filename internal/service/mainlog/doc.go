// Package mainlog keeps the output of main processes on disk, as JSON lines in files of bounded
// number and size for each sandbox.
//
// # Files
//
// Each sandbox has a directory with 00000001.log and so on, of which the oldest are removed when
// there are too many. A line is a record: output of one stream with its time and its offset in the
// output of the process. The first record of each file and of each process identifies the process
// and the offset of its next output. So the next daemon finds the place to continue in the last
// file. An incomplete last line, as a crash leaves it, is written again.
//
// # Limits
//
// Besides the bound of each log, all logs together have one, which evicts the oldest files of those
// that have most. A disk that refuses output does not stop the process: the output is missing, and
// readers are told how much ([api.LogEntry.Dropped]).
//
// # Writers and readers
//
// The main processes of a sandbox write one after the other ([Log.Enqueue]); one that is late
// writes nothing ([ErrOlder]). Nothing is synced. A reader reads the files, so that a slow one
// holds up no writer.
//
// The package knows sandboxes by their ids only, and does not know where output comes from.
package mainlog
