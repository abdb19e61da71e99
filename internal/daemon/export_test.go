package daemon

import "time"

// SetDrain sets the time that requests under way have when the daemon stops.
func (d *Daemon) SetDrain(t time.Duration) { d.drain = t }
