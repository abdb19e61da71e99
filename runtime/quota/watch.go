package quota

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// fastest is the growth per second that no program exceeds: writes to the page cache reach some
	// GB/s, and a core makes some hundred thousand files.
	fastestBytes  = 4 << 30
	fastestInodes = 500_000
	// shortest and longest bound the interval between two looks at the file system's free space.
	shortest = 5 * time.Millisecond
	longest  = 250 * time.Millisecond
	// quiet is the shortest interval while the free space stays.
	quiet = 25 * time.Millisecond
	// measured is the interval after which a sandbox is measured in any case: what it writes does not
	// show in the free space while another one deletes as much.
	measured = 5 * time.Second
	// share bounds the part of the time that is spent on measuring a sandbox that does not grow: one
	// to so many.
	share = 5
	// holdTimeout bounds the wait for a sandbox to stand still.
	holdTimeout = 100 * time.Millisecond
	// endRetry is the interval at which a sandbox is ended again that has not ended.
	endRetry = time.Second
	// noise is the growth of a sandbox that is not taken for the cause of a full disk.
	noise = 1 << 20
)

// Free is the unused space of a file system. Inodes is negative if the file system does not count
// them, Bytes if it counts them late.
type Free struct {
	Bytes, Inodes int64
	Available     int64 // bytes for users other than root
}

// ReadFree returns the unused space of the file system of dir.
func ReadFree(dir string) (Free, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return Free{}, fmt.Errorf("read the free space of %s: %w", dir, err)
	}
	f := Free{int64(st.Bfree) * st.Frsize, int64(st.Ffree), int64(st.Bavail) * st.Frsize} //nolint:gosec // G115: no disk has 8 EiB
	if st.Files == 0 {
		f.Inodes = -1
	}
	switch st.Type {
	case unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.TMPFS_MAGIC:
	default: // btrfs and others count what is not written yet in a file and not in the file system
		f.Bytes = -1
	}
	return f, nil
}

// Reserve is the free space of a file system that subjects may use by half. Zero means none.
type Reserve struct{ Bytes, Inodes int64 }

// Subject is a sandbox that is watched. Its functions may be called from one goroutine at a time.
type Subject struct {
	Limit Usage
	// Measure returns what it uses. It may stop counting beyond its argument.
	Measure func(limit Usage) (Usage, error)
	// Hold makes its processes stand still until release is called.
	Hold func(ctx context.Context) (release func(), err error)
	// End begins to end it, for the reason. It is called again while the subject stays.
	End func(reason string)
}

type subject struct {
	Subject
	used   Usage
	grown  bool // at the last measurement
	alarm  bool // the last measurement was for the file system's loss, and it had not grown
	free   Free // before the last measurement
	at     time.Time
	took   time.Duration
	known  bool // measured at all
	ended  time.Time
	reason string
	base   *Usage // at the beginning of a shortage
}

// Watch ends subjects that exceed their limits, and those that fill a file system down to its
// reserve.
type Watch struct {
	// Free returns the unused space of the file system that the subjects are on.
	Free func() (Free, error)
	// Log reports that the watch is blind.
	Log func(message string, err error)

	now func() time.Time

	mu       sync.Mutex
	subjects map[string]*subject
	reserve  Reserve
	running  bool
	wake     chan struct{}

	// Of the goroutine that looks.
	blind   bool
	short   bool
	shortAt Free
	last    Free // at the last look
	pause   time.Duration
}

// New returns a watch of one file system.
func New(free func() (Free, error), log func(string, error)) *Watch {
	return &Watch{Free: free, Log: log, now: time.Now, subjects: make(map[string]*subject), wake: make(chan struct{}, 1)}
}

// Set watches a subject from now on, or changes it.
func (w *Watch) Set(id string, s Subject) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if was := w.subjects[id]; was != nil {
		next := *was
		next.Subject, next.at = s, time.Time{}
		w.subjects[id] = &next
	} else {
		w.subjects[id] = &subject{Subject: s}
	}
	if !w.running {
		w.running = true
		go w.run()
	}
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// Remove ends the watch of a subject. The goroutine of a watch ends with its last subject.
func (w *Watch) Remove(id string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.subjects, id)
}

// SetReserve has the subjects ended that leave less than half of the reserve of the file system.
func (w *Watch) SetReserve(f Reserve) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reserve = f
}

// Used returns the last measurement of a subject; ok is false if there is none.
func (w *Watch) Used(id string) (u Usage, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.subjects[id]
	if s == nil || !s.known {
		return Usage{}, false
	}
	return s.used, true
}

func (w *Watch) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-w.wake:
		}
		next, ok := w.look()
		if !ok {
			return
		}
		timer.Reset(next)
	}
}

// look is one round. It returns the time until the next one, or false if there is nothing to watch.
func (w *Watch) look() (next time.Duration, ok bool) {
	w.mu.Lock()
	if len(w.subjects) == 0 {
		w.running = false
		w.mu.Unlock()
		return 0, false
	}
	subjects, reserve := maps.Clone(w.subjects), w.reserve
	w.mu.Unlock()
	free, err := w.Free()
	if err != nil {
		if !w.blind {
			w.Log("the free space of the disk is not known: sandboxes are measured more often, and no reserve is kept", err)
		}
		free = Free{-1, -1, math.MaxInt64}
	}
	w.blind = err != nil
	next = longest
	for _, id := range slices.Sorted(maps.Keys(subjects)) {
		s := subjects[id]
		if s.Limit == (Usage{}) {
			continue
		}
		if left := w.lookAt(id, s, free); left < next {
			next = left
		}
	}
	if reserve != (Reserve{}) {
		next = min(next, w.spare(subjects, free, reserve))
	}
	// While nothing is written to the file system, looks are fewer.
	if w.pause = min(2*w.pause, quiet); free != w.last || free.Bytes < 0 {
		w.pause = shortest
	}
	w.last = free
	return max(next, w.pause), true
}

// lookAt measures a subject if it may have come near its limit. It returns the time in which it
// cannot reach half of the rest.
func (w *Watch) lookAt(id string, s *subject, free Free) time.Duration {
	now := w.now()
	switch {
	case s.ended.IsZero():
	case now.Sub(s.ended) < endRetry:
		return endRetry
	default:
		w.end(s, s.reason)
		return endRetry
	}
	grown, elapsed := s.bound(free, now), now.Sub(s.at)
	// Also what it writes at this rate while it is measured.
	ahead := Usage{grown.Bytes + during(grown.Bytes, elapsed, s.took), grown.Inodes + during(grown.Inodes, elapsed, s.took)}
	near := reaches(ahead.Bytes, s.Limit.Bytes, s.used.Bytes, 1) || reaches(ahead.Inodes, s.Limit.Inodes, s.used.Inodes, 1)
	half := reaches(ahead.Bytes, s.Limit.Bytes, s.used.Bytes, 2) || reaches(ahead.Inodes, s.Limit.Inodes, s.used.Inodes, 2)
	pause := s.took // a sandbox that grows is measured half of the time, if need be
	switch {
	case !s.grown && near && !s.alarm: // it may have begun to write
		pause = 0
	case !s.grown:
		pause = share * s.took
	}
	if s.known && (!half && elapsed < measured || elapsed < s.took+pause) {
		return s.until(grown)
	}
	hold := near && s.known && s.grown
	over, reason := w.measure(id, s, free, hold)
	if over && !hold {
		// What moves to another directory during the walk may have been counted twice.
		over, reason = w.measure(id, s, free, true)
	}
	w.mu.Lock() // Set reads it
	s.alarm = near && !s.grown
	w.mu.Unlock()
	if over {
		w.end(s, reason)
		return endRetry
	}
	return s.until(Usage{})
}

func (w *Watch) end(s *subject, reason string) {
	s.End(reason)
	w.mu.Lock() // Set reads it
	defer w.mu.Unlock()
	s.ended, s.reason = w.now(), reason
}

// measure counts a subject, standing still if that is asked for.
func (w *Watch) measure(id string, s *subject, free Free, hold bool) (over bool, reason string) {
	if hold {
		defer s.hold()()
	}
	began := w.now()
	used, err := s.Measure(s.Limit)
	w.mu.Lock()
	defer w.mu.Unlock()
	s.grown = !s.known || used.Bytes > s.used.Bytes || used.Inodes > s.used.Inodes
	s.used, s.free, s.at, s.known = used, free, began, true
	s.took = w.now().Sub(began)
	switch {
	case w.subjects[id] != s: // removed or changed meanwhile
		return false, ""
	case errors.Is(err, ErrDeep):
		return true, ErrDeep.Error()
	case err != nil: // what cannot be counted cannot be held to a limit
		return true, err.Error()
	case used.Exceeds(s.Limit):
		return true, excess(used, s.Limit)
	}
	return false, ""
}

// hold makes the subject stand still if it can be: else it is measured as it runs.
func (s *subject) hold() (release func()) {
	ctx, cancel := context.WithTimeout(context.Background(), holdTimeout)
	defer cancel()
	if release, err := s.Hold(ctx); err == nil {
		return release
	}
	return func() {}
}

// excess is the reason of an end.
func excess(used, limit Usage) string {
	if limit.Bytes > 0 && used.Bytes > limit.Bytes {
		return fmt.Sprintf("%d MiB are used, and the limit is %d MiB", (used.Bytes+1<<20-1)>>20, limit.Bytes>>20)
	}
	return fmt.Sprintf("more than the limit of %d files are used", limit.Inodes)
}

// bound returns the most that a subject can have grown since its last measurement: what the time
// allows, and no more than the file system has lost. Another subject that deletes files at the same
// time hides growth; see measured.
func (s *subject) bound(free Free, now time.Time) Usage {
	most := func(fastest, before, after int64) int64 {
		n := int64(math.Min(now.Sub(s.at).Seconds()*float64(fastest), math.MaxInt64/4))
		if before >= 0 && after >= 0 {
			n = min(n, max(0, before-after))
		}
		return n
	}
	return Usage{most(fastestBytes, s.free.Bytes, free.Bytes), most(fastestInodes, s.free.Inodes, free.Inodes)}
}

// during returns the growth in the time took at the rate of grown in elapsed.
func during(grown int64, elapsed, took time.Duration) int64 {
	if elapsed <= 0 {
		return 0
	}
	return int64(min(float64(grown)*took.Seconds()/elapsed.Seconds(), math.MaxInt64/4))
}

// reaches reports whether a growth uses up a part of what is left.
func reaches(grown, limit, used, part int64) bool {
	return limit > 0 && grown > 0 && grown >= (limit-used)/part
}

// until returns the time in which a subject cannot use up half of its rest.
func (s *subject) until(grown Usage) time.Duration {
	t := longest
	part := func(limit, used, fastest int64) {
		if limit > 0 {
			seconds := float64(max(0, limit-used)) / 2 / float64(fastest)
			t = min(t, time.Duration(seconds*float64(time.Second)))
		}
	}
	part(s.Limit.Bytes, s.used.Bytes+grown.Bytes, fastestBytes)
	part(s.Limit.Inodes, s.used.Inodes+grown.Inodes, fastestInodes)
	return t
}

// spare keeps the reserve. Below it subjects are measured; below half of it the one that has grown
// most since then is ended, and the next one if the file system loses still more. Subjects that do
// not grow are never ended, but for those that cannot be counted. It returns the time in which half
// of the rest cannot be used up.
func (w *Watch) spare(subjects map[string]*subject, free Free, reserve Reserve) time.Duration {
	under := func(part int64) bool {
		return free.Available < reserve.Bytes/part || free.Inodes >= 0 && free.Inodes < reserve.Inodes/part
	}
	if !under(1) {
		if w.short {
			w.short = false
			w.mu.Lock()
			for _, s := range subjects {
				s.base = nil
			}
			w.mu.Unlock()
		}
		t := min(longest, time.Duration(float64(free.Available-reserve.Bytes)/2/fastestBytes*float64(time.Second)))
		if free.Inodes >= 0 {
			t = min(t, time.Duration(float64(free.Inodes-reserve.Inodes)/2/fastestInodes*float64(time.Second)))
		}
		return t
	}
	if w.short && (!under(2) || free.Available >= w.shortAt.Available && free.Inodes >= w.shortAt.Inodes) {
		return shortest // there is room, or nothing was written since
	}
	w.short, w.shortAt = true, free
	var worst *subject
	var most int64
	for _, id := range slices.Sorted(maps.Keys(subjects)) {
		s := subjects[id]
		if !s.ended.IsZero() {
			continue
		}
		used, counted := s.count()
		if s.base == nil {
			base := used
			if !counted {
				base = Usage{}
			}
			w.mu.Lock()
			s.base = &base
			w.mu.Unlock()
			continue
		}
		if grown := used.Bytes - s.base.Bytes + 4096*(used.Inodes-s.base.Inodes); grown > max(most, noise) {
			worst, most = s, grown
		}
	}
	if worst != nil && under(2) && worst.stillGrown() {
		w.end(worst, "the disk is short, and no sandbox filled it faster")
	}
	return shortest
}

// countable is the number of files beyond which a subject is not counted below the reserve: the
// counting takes memory, and the time in which no other one is looked at.
const countable = 2 << 20

// count counts a subject, or returns false and an impossible amount: deeper directories or more
// files than can be counted, which no program makes by chance.
func (s *subject) count() (Usage, bool) {
	used, err := s.Measure(Usage{Inodes: countable})
	if err != nil || used.Inodes > countable {
		return Usage{math.MaxInt64 / 4, 0}, false
	}
	return used, true
}

// stillGrown reports whether a subject has grown in a shortage, counted as it stands still: what
// moves to another directory during a walk may have been counted twice.
func (s *subject) stillGrown() bool {
	defer s.hold()()
	used, _ := s.count()
	return used.Bytes-s.base.Bytes+4096*(used.Inodes-s.base.Inodes) > noise
}
