// Package events keeps the record of changes: what happened to the objects of each tenant, on disk,
// with followers.
//
// # Files
//
// Each tenant has a directory, so that no tenant sees another one's events or pushes them out. It
// holds segments, files of JSON lines. The name of a segment is the number of events that were
// recorded before it. When a segment is full the next begins, and the oldest goes. IDs are
// microseconds since 1970, or one more than the last: they increase even if a crash of the host
// loses the end of the record.
//
// # Writing
//
//	Publish ─▶ queue (memory, bounded) ─▶ one writer a tenant ─▶ one write(2) a batch ─▶ followers
//
// Publish takes neither a system call nor a wait, and may be called with locks held. The writer
// starts at once; for events of execs alone, without a follower, after some milliseconds. Nothing
// is synced: a crash of the daemon loses what its writer has not taken, a crash of the host also
// what the kernel has not written. The next daemon cuts an incomplete end off. Followers see an
// event only when it is written, so that no follower knows an ID that the next daemon gives away
// again.
//
// # Reading
//
// A follower reads the files, and has no queue that could grow. If it is slower than the segments
// go, the gap in their names tells it how many events it has lost.
package events
