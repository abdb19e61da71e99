package libct

import (
	"context"
	"fmt"
	"path/filepath"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/launcher"
	"github.com/sandboxd/sandboxd/runtime/cgroup"
)

// Stats implements runtime.Engine.
func (e *Engine) Stats(ctx context.Context, id string) (api.Stats, error) {
	in, err := e.find(ctx, id)
	if err != nil {
		return api.Stats{}, err
	}
	e.mu.Lock()
	started := in.started
	e.mu.Unlock()
	now := time.Now()
	st := api.Stats{}
	if e.host.Cgroup {
		st = readStats(filepath.Join(launcher.CgroupDir, id))
	}
	st.At, st.WallMS = now.UTC(), ms(now.Sub(started).Microseconds())
	st.Disk = e.diskStats(in, id)
	e.mu.Lock()
	excess := in.excess
	e.mu.Unlock()
	if excess != "" {
		if st.Memory == nil {
			st.Memory = new(api.MemoryStats)
		}
		st.Memory.Exceeded = excess
	}
	return st, nil
}

// OOMKills implements runtime.Engine.
func (e *Engine) OOMKills(ctx context.Context, id string) (int, error) {
	in, err := e.find(ctx, id)
	if err != nil {
		return 0, err
	}
	e.mu.Lock()
	held := in.enforced.Memory == "cgroup"
	e.mu.Unlock()
	if !held {
		return 0, nil
	}
	n, ok := cgroup.Keyed(filepath.Join(launcher.CgroupDir, id), "memory.events")["oom_kill"]
	if !ok {
		return 0, fmt.Errorf("sandbox %s: its memory.events tell of no kills", id)
	}
	return int(n), nil
}

// readStats reads a cgroup's files. Each may be missing: that of a controller that is not
// delegated, and those that the kernel is too old for.
func readStats(dir string) api.Stats {
	var st api.Stats
	value := func(file string) *int64 {
		if n, ok := cgroup.Value(dir, file); ok {
			return &n
		}
		return nil
	}
	memory := api.MemoryStats{
		Current: value("memory.current"), Peak: value("memory.peak"), Swap: value("memory.swap.current"), SwapPeak: value("memory.swap.peak"),
		OOMKills: of(cgroup.Keyed(dir, "memory.events"), "oom_kill"),
	}
	if memory != (api.MemoryStats{}) {
		st.Memory = &memory
	}
	times := cgroup.Keyed(dir, "cpu.stat")
	inMS := func(key string) *float64 {
		if n, ok := times[key]; ok {
			v := ms(n)
			return &v
		}
		return nil
	}
	cpu := api.CPUStats{
		UsageMS: inMS("usage_usec"), UserMS: inMS("user_usec"), SystemMS: inMS("system_usec"),
		Throttled: of(times, "nr_throttled"), ThrottledMS: inMS("throttled_usec"),
	}
	if cpu != (api.CPUStats{}) {
		st.CPU = &cpu
	}
	pids := api.PidsStats{Current: value("pids.current"), Peak: value("pids.peak"), Refused: of(cgroup.Keyed(dir, "pids.events"), "max")}
	if pids != (api.PidsStats{}) {
		st.Pids = &pids
	}
	for _, line := range cgroup.ReadNested(dir, "io.stat") {
		number := func(key string) int64 {
			n, _ := strconv.ParseInt(line.Values[key], 10, 64) // the four have been there from the beginning
			return n
		}
		st.IO = append(st.IO, api.IOStats{
			Device: line.Key, ReadBytes: number("rbytes"), WriteBytes: number("wbytes"), ReadOps: number("rios"), WriteOps: number("wios"),
		})
	}
	for _, resource := range []string{"cpu", "memory", "io"} {
		var p api.Pressure
		for _, line := range cgroup.ReadNested(dir, resource+".pressure") {
			switch l := pressureLine(line.Values); line.Key {
			case "some":
				p.Some = l
			case "full":
				p.Full = l
			}
		}
		if p != (api.Pressure{}) {
			if st.Pressure == nil {
				st.Pressure = make(map[string]api.Pressure)
			}
			st.Pressure[resource] = p
		}
	}
	return st
}

func pressureLine(values map[string]string) *api.PressureLine {
	number := func(key string) float64 {
		v, _ := strconv.ParseFloat(values[key], 64) // likewise
		return v
	}
	return &api.PressureLine{Avg10: number("avg10"), Avg60: number("avg60"), Avg300: number("avg300"), TotalMS: number("total") / 1000}
}

func of(values map[string]int64, key string) *int64 {
	if n, ok := values[key]; ok {
		return &n
	}
	return nil
}

func ms(us int64) float64 { return float64(us) / 1000 }
