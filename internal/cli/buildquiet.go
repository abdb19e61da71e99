package cli

import "github.com/sandboxd/sandboxd/api"

// maxLastOutput is the number of bytes of a step's output that a quiet build keeps.
const maxLastOutput = 256 << 10

// lastOutput keeps the latest output of the step that is being done, for a build that fails.
type lastOutput struct {
	step    int
	events  []api.BuildEvent
	size    int
	dropped bool
}

func (l *lastOutput) event(e api.BuildEvent) {
	if e.Step != l.step {
		*l = lastOutput{step: e.Step}
	}
	if e.Stream == "" {
		return
	}
	l.events = append(l.events, e)
	l.size += eventSize(e)
	for l.size > maxLastOutput && len(l.events) > 1 {
		l.size -= eventSize(l.events[0])
		l.events, l.dropped = l.events[1:], true
	}
}

func eventSize(e api.BuildEvent) int { return len(e.Output) + len(e.Data) }

// show prints the output, of which the beginning may be missing.
func (l *lastOutput) show(p *buildProgress) {
	if l.dropped {
		p.output(api.BuildEvent{Stream: "stdout", Output: "...\n"})
	}
	for _, e := range l.events {
		p.output(e)
	}
}
