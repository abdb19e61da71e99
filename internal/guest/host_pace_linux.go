package guest

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// paceShare is which part of the time may go by in read(2) alone. What belongs to it, as waking up and what becomes of the bytes, takes ten
	// times as much and more.
	paceShare = 200
	// paceBurst is how long a reader at that share would have read already, before anything is slowed.
	paceBurst = 2 * time.Second
	// fastestRead and slowestRead bound what is measured: 2000 and 25 reads a second, of what a pipe holds each.
	fastestRead = 2500 * time.Nanosecond
	slowestRead = 200 * time.Microsecond
)

// readTime is how long a pipe's content takes to be read on this machine, at best.
var readTime = sync.OnceValue(func() time.Duration {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return slowestRead
	}
	defer closeAll(p[:])
	buf := make([]byte, spliceSize)
	best := slowestRead
	for range 16 {
		n, err := unix.Write(p[1], buf)
		if err != nil || n == 0 {
			break
		}
		began := time.Now()
		if n, err = unix.Read(p[0], buf); err != nil || n == 0 {
			break
		}
		best = min(best, time.Since(began)*spliceSize/time.Duration(n))
	}
	return max(best, fastestRead)
})

// Pace bounds what it costs to read a stream of output that nobody waits for: beyond an answer's limit, or into a log of which the beginning
// is dropped. A program floods within the limits of its sandbox, while who reads is in nobody's, and so takes a tenth of a processor, about.
// One who is read slowly waits, as at any pipe that is full. The zero value is ready; it is not for several goroutines at once.
type Pace struct {
	due time.Time // when all that was read would have been, at that share
}

// Wait notes work as that of so many reads, whatever they gave, and waits until the next one is due: not at all for who does not flood, and at most
// 40 ms for each of them.
func (p *Pace) Wait(reads int) {
	time.Sleep(p.read(time.Now(), reads, readTime())) //nolint:forbidigo // there is no event: the pause is what is wanted
}

func (p *Pace) read(now time.Time, reads int, each time.Duration) time.Duration {
	each *= paceShare
	if begun := now.Add(-paceBurst); p.due.Before(begun) {
		p.due = begun
	}
	p.due = p.due.Add(time.Duration(reads) * each)
	return max(0, p.due.Sub(now))
}
