package runtime

import "time"

const (
	// demandWindow is the time over which requests are counted, in slots of demandSlot.
	demandWindow = 10 * time.Minute
	demandSlot   = time.Second
	demandSlots  = int64(demandWindow / demandSlot)
)

// demand counts the recent requests for sandboxes of a pool, and computes from them the number
// worth keeping ready: the most within two seconds, about the time that a pool needs to refill.
// Older requests count for less, evenly down to zero at the end of the window, so that an unused
// pool shrinks one by one.
//
// The zero value is ready for use. Times must not go back.
type demand struct {
	began  time.Time
	counts [demandSlots]int32 // of the slots of the window before, and in, the one of latest
	latest int64
}

// advance makes now's slot the latest one.
func (d *demand) advance(now time.Time) {
	if d.began.IsZero() {
		d.began = now
	}
	slot := max(d.latest, int64(now.Sub(d.began)/demandSlot))
	for i := range min(slot-d.latest, demandSlots) {
		d.counts[(slot-i)%demandSlots] = 0
	}
	d.latest = slot
}

// ask notes that one was asked for.
func (d *demand) ask(now time.Time) {
	d.advance(now)
	d.counts[d.latest%demandSlots]++
}

// wanted returns the number worth keeping ready.
func (d *demand) wanted(now time.Time) int {
	d.advance(now)
	most := int64(0)
	for age := range min(d.latest+1, demandSlots) {
		slot := d.latest - age
		n := int64(d.counts[slot%demandSlots])
		if slot > 0 && age+1 < demandSlots { // the one before is still in the window
			n += int64(d.counts[(slot-1)%demandSlots])
		}
		most = max(most, (n*(demandSlots-age)+demandSlots-1)/demandSlots)
	}
	return int(most)
}
