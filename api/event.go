package api

import "time"

// EventType is the kind of object that an event is about.
type EventType string

// Types of events.
const (
	EventSandbox  EventType = "sandbox"
	EventExec     EventType = "exec"
	EventPort     EventType = "port" // a published port of a sandbox; it closes when the sandbox stops
	EventImage    EventType = "image"
	EventBuild    EventType = "build"
	EventSnapshot EventType = "snapshot"
	EventSecret   EventType = "secret"
	EventVolume   EventType = "volume"
	EventNetwork  EventType = "network" // a named network
	EventCode     EventType = "code"    // a code run that policies or the operator's hook judged
)

// EventAction names a change of an object.
type EventAction string

// Actions of events. The comments name the types that have them.
const (
	ActionCreated    EventAction = "created"       // sandbox: it runs, or is stopped if it was created so; snapshot: it was taken; volume, network
	ActionStarted    EventAction = "started"       // sandbox: again; exec
	ActionPaused     EventAction = "paused"        // sandbox
	ActionResumed    EventAction = "resumed"       // sandbox
	ActionUpdated    EventAction = "updated"       // sandbox: limits, labels, timeouts, network or published ports
	ActionRenamed    EventAction = "renamed"       // sandbox
	ActionForked     EventAction = "forked"        // sandbox: each fork has an event of its own creation, too
	ActionRolledBack EventAction = "rolled_back"   // sandbox
	ActionHealth     EventAction = "health_status" // sandbox: Health is the new status
	ActionStopped    EventAction = "stopped"       // sandbox: its processes have ended, or it is lost
	ActionEnded      EventAction = "ended"         // exec
	ActionDeleted    EventAction = "deleted"       // sandbox
	ActionPublished  EventAction = "published"     // port
	ActionPulled     EventAction = "pulled"        // image
	ActionPushed     EventAction = "pushed"        // image
	ActionImported   EventAction = "imported"      // image, snapshot, volume
	ActionTagged     EventAction = "tagged"        // image: From is the other name
	ActionCommitted  EventAction = "committed"     // image: made of a sandbox
	ActionRemoved    EventAction = "removed"       // image, snapshot, secret, volume, network
	ActionBuilt      EventAction = "built"         // build: Object is the image's digest
	ActionFailed     EventAction = "failed"        // build
	ActionSet        EventAction = "set"           // secret
	ActionRefused    EventAction = "refused"       // code: Reason says why
	ActionWarned     EventAction = "warned"        // code: it runs, and Reason has the first findings
	ActionAmended    EventAction = "amended"       // code: the hook has changed it before it runs

	ActionConnected    EventAction = "connected"    // network: Sandbox was put into it after its creation
	ActionDisconnected EventAction = "disconnected" // network: Sandbox was taken out of it
)

// Event is one change of an object: a line of the answer to GET /v1/events.
type Event struct {
	// ID increases from event to event, across restarts of the daemon too. IDs are not consecutive.
	ID     uint64      `json:"id,omitempty"`
	Time   time.Time   `json:"time,omitzero"`
	Type   EventType   `json:"type,omitempty"`
	Action EventAction `json:"action,omitempty"`
	// Object is the ID of a sandbox, exec or snapshot, the reference or digest of an image, the name
	// of a secret, volume or network, the digest of code, or where a port is published.
	Object   string            `json:"object,omitempty"`
	Name     string            `json:"name,omitempty"`     // of a sandbox or snapshot
	Sandbox  string            `json:"sandbox,omitempty"`  // ID of the sandbox of an exec, port, snapshot, code, committed image or connection
	Image    string            `json:"image,omitempty"`    // reference of a sandbox's image
	Snapshot string            `json:"snapshot,omitempty"` // ID of the one that a sandbox was created from or rolled back to
	State    SandboxState      `json:"state,omitempty"`    // of a sandbox, after the change; of the one that is connected
	Health   HealthStatus      `json:"health,omitempty"`   // of a sandbox
	Idle     bool              `json:"idle,omitempty"`     // of a start or stop: the sandbox runs without its main process
	Reason   string            `json:"reason,omitempty"`   // of a stop, failure or judgement
	Code     *int              `json:"code,omitempty"`     // exit code of an exec, or of a stopped sandbox's main process; absent if unknown
	Program  string            `json:"program,omitempty"`  // argv[0] of an exec; language of code
	Main     bool              `json:"main,omitempty"`     // the exec is a sandbox's main process
	From     string            `json:"from,omitempty"`     // name before a renaming; source of a tag
	Forks    []string          `json:"forks,omitempty"`    // IDs
	Port     *PortMapping      `json:"port,omitempty"`
	Networks []string          `json:"networks,omitempty"` // named ones of a sandbox that runs now, or has stopped
	Labels   map[string]string `json:"labels,omitempty"`   // of a sandbox, snapshot, volume or network
	// Lost is the number of events before this one that are not kept, or that a slow client missed; 1
	// if the number is unknown. A line with Lost has nothing else.
	Lost uint64 `json:"lost,omitempty"`

	Error *Problem `json:"error,omitempty"` // of a last line: the daemon stops
}

// EventFilterKeys are the keys of filters of events, in the order of messages.
func EventFilterKeys() []string {
	return []string{"type", "action", "object", "name", "sandbox", "image", "label"}
}
