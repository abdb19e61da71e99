package host

import (
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/internal/unixmsg"

	"golang.org/x/sys/unix"
)

const (
	// paceShare is the part of the time that may go by in read(2) alone, one in paceShare. Waking up
	// and processing the bytes takes ten times as long and more.
	paceShare = 200
	// paceBurst is the time in which a reader may exceed its share, before it is slowed.
	paceBurst = 2 * time.Second
	// fastestRead and slowestRead bound the measured time: 2,000 and 50 reads a second, each of a full
	// pipe.
	fastestRead = 2500 * time.Nanosecond
	slowestRead = 100 * time.Microsecond
)

// measuredRead is the measured read time, zero before.
var measuredRead atomic.Int64

// readTime returns the time in which this machine reads a full pipe, at best. If no pipe can be
// made, that is slowestRead until one can.
func readTime() time.Duration {
	if known := measuredRead.Load(); known > 0 {
		return time.Duration(known)
	}
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return slowestRead
	}
	defer unixmsg.CloseAll(p[:])
	buf := make([]byte, spliceSize)
	best := slowestRead
	for range 16 {
		n, err := unix.Write(p[1], buf)
		if err != nil || n == 0 {
			return slowestRead
		}
		began := time.Now()
		if n, err = unix.Read(p[0], buf); err != nil || n == 0 {
			return slowestRead
		}
		best = min(best, time.Since(began)*spliceSize/time.Duration(n))
	}
	best = max(best, fastestRead)
	measuredRead.Store(int64(best))
	return best
}

// Pace throttles the reader of output that no client gets: output beyond an answer's limit, a log
// that drops its oldest part, dropped frames of a context. A client paces other output by reading
// it. A program floods within the limits of its sandbox, but its reader is in no sandbox, and so
// takes about a tenth of a processor. A program whose output is read slowly waits, as at any full
// pipe. The zero value is ready. A Pace is for one goroutine.
type Pace struct {
	due time.Time // when all reads so far would have been done at that share
}

// Wait records a number of reads and waits until the next one is due. A program that does not flood
// never waits, others 20 ms per read at most. Once over is closed, Wait returns: the kernel holds
// little of a program that has ended.
func (p *Pace) Wait(over <-chan struct{}, reads int) {
	wait := p.read(time.Now(), reads, readTime())
	if wait == 0 {
		return
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-over:
	}
}

func (p *Pace) read(now time.Time, reads int, each time.Duration) time.Duration {
	each *= paceShare
	if begun := now.Add(-paceBurst); p.due.Before(begun) {
		p.due = begun
	}
	p.due = p.due.Add(time.Duration(reads) * each)
	return max(0, p.due.Sub(now))
}
