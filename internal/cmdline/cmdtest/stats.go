package cmdtest

import (
	"time"

	"github.com/sandboxd/sandboxd/api"
)

// nextStats returns a sample of each sandbox: a second after the last one, of which a quarter was
// spent by programs. The second sandbox has a limit that nothing enforces.
func (f *Daemon) nextStats() api.StatsList {
	f.samples++
	list := api.StatsList{Sandboxes: []api.SandboxStats{}}
	for i, s := range f.Sandboxes {
		st := api.Stats{
			At: time.Date(2026, 1, 2, 3, 4, 5+f.samples, 0, time.UTC), Memory: &api.MemoryStats{Current: new(int64(64 << 20))},
			CPU: &api.CPUStats{UsageMS: new(250 * float64(f.samples))}, Pids: &api.PidsStats{Current: new(int64(3))},
		}
		if i == 0 {
			st.Memory.Limit = new(int64(256 << 20))
			st.Network = &api.NetworkStats{BytesIn: 2000, BytesOut: 1000}
			st.IO = []api.IOStats{{ReadBytes: 1000}, {ReadBytes: 500, WriteBytes: 7000}}
		}
		list.Sandboxes = append(list.Sandboxes, api.SandboxStats{ID: s.ID, Name: s.Name, Stats: st})
	}
	return list
}
