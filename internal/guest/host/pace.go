package host

import (
	"github.com/sandboxd/sandboxd/internal/unixmsg"

	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// paceShare is which part of the time may go by in read(2) alone. What belongs to it, as waking up and what becomes of the bytes, takes ten
	// times as much and more.
	paceShare = 200
	// paceBurst is how long a reader at that share would have read already, before anything is slowed.
	paceBurst = 2 * time.Second
	// fastestRead and slowestRead bound what is measured: 2000 and 50 reads a second, of what a pipe holds each.
	fastestRead = 2500 * time.Nanosecond
	slowestRead = 100 * time.Microsecond
)

// measuredRead is the read time that was measured, 0 before.
var measuredRead atomic.Int64

// readTime is how long a pipe's content takes to be read on this machine, at best. Where no pipe is to be had it is the slowest, until one is.
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

// Pace bounds what it costs to read a stream of output that nobody waits for: beyond an answer's limit, or into a log of which the beginning
// is dropped. A program floods within the limits of its sandbox, while who reads is in nobody's, and so takes a tenth of a processor, about.
// One who is read slowly waits, as at any pipe that is full. The zero value is ready; it is not for several goroutines at once.
type Pace struct {
	due time.Time // when all that was read would have been, at that share
}

// Wait notes work as that of so many reads, whatever they gave, and waits until the next one is due: not at all for who does not flood, at most
// 20 ms for each of them, and never once over is closed, for what the kernel still holds of a program that has ended is little.
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
