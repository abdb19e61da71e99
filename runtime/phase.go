package runtime

import (
	"slices"

	"github.com/sandboxd/sandboxd/api"
)

// phase is the step in its life at which the supervisor holds a sandbox. It decides which
// operations may begin. The state of the record is the part of it that clients see, and is on disk:
// a deletion that fails leaves that as it was.
type phase uint8

const (
	phaseCreating phase = iota // the engine starts it for the first time, or Open adopts it
	phaseRunning               // it has processes and can be used
	phasePausing               // Pause is under way; nothing new begins in it
	phasePaused                // its processes stand still
	phaseResuming              // Resume is under way
	phaseEnding                // its processes are asked to end or killed, for sandbox.endReason
	phaseEnded                 // it has no processes; its files wait for Start or Delete
	phaseStarting              // ended, and reserved: Start, Rollback or the reconciler works on it
	phaseDeleting              // a deletion is under way, from any phase but creating
	phaseDeleted               // it is in no map any more
	phases                     // the number of phases
)

// phaseTransitions has one row per phase: its name, and the phases that may follow it.
var phaseTransitions = [phases]struct {
	name string
	next []phase
}{
	phaseCreating: {"creating", []phase{phaseRunning, phasePaused, phaseEnded, phaseDeleted}},
	phaseRunning:  {"running", []phase{phasePausing, phaseEnding, phaseEnded, phaseDeleting}},
	phasePausing:  {"pausing", []phase{phasePaused, phaseRunning, phaseEnding, phaseEnded, phaseDeleting}},
	phasePaused:   {"paused", []phase{phaseResuming, phaseEnding, phaseEnded, phaseDeleting}},
	phaseResuming: {"resuming", []phase{phaseRunning, phasePaused, phaseEnding, phaseEnded, phaseDeleting}},
	phaseEnding:   {"ending", []phase{phaseEnded, phaseDeleting}},
	phaseEnded:    {"ended", []phase{phaseStarting, phaseDeleting}},
	// The deletion of all sandboxes by Close does not wait for the reconciler.
	phaseStarting: {"starting", []phase{phaseRunning, phaseEnded, phaseDeleting}},
	// A deletion that fails leaves the sandbox as it found it, or as it has ended meanwhile.
	phaseDeleting: {"deleting", []phase{phaseDeleted, phaseRunning, phasePaused, phaseEnding, phaseEnded}},
	phaseDeleted:  {"deleted", nil},
}

func (p phase) String() string { return phaseTransitions[p].name }

// mayBecome reports whether next may follow p.
func (p phase) mayBecome(next phase) bool {
	return slices.Contains(phaseTransitions[p].next, next)
}

// live reports whether a sandbox in this phase has processes that shall go on.
func (p phase) live() bool {
	return p == phaseRunning || p == phasePausing || p == phasePaused || p == phaseResuming
}

// changing reports whether the sandbox is between running and paused.
func (p phase) changing() bool { return p == phasePausing || p == phaseResuming }

// phaseOf returns the phase of a live sandbox whose record has this state.
func phaseOf(state api.SandboxState) phase {
	if state == api.StatePaused {
		return phasePaused
	}
	return phaseRunning
}
