package api

// Build says what is built of a context. It is the parameter "options" of POST /v1/builds, as JSON; the body is the
// context, a tar stream. The answer is one [BuildEvent] a line.
type Build struct {
	Tags []string `json:"tags,omitempty"` // names of the image; without any it is called localhost/build@sha256:...
	// Dockerfile is its name in the context, by default Dockerfile. One called ".sandboxd-dockerfile" is no part of the
	// context: no COPY sees it.
	Dockerfile string            `json:"dockerfile,omitempty"`
	Target     string            `json:"target,omitempty"` // name or number of a stage; default: the last
	Args       map[string]string `json:"args,omitempty"`   // for ARG; SOURCE_DATE_EPOCH among them sets all times
	Labels     map[string]string `json:"labels,omitempty"` // of the image
	NoCache    bool              `json:"no_cache,omitempty"`
	Platform   string            `json:"platform,omitempty"` // must be one that this host runs
	Network    Network           `json:"network,omitzero"`   // of programs that RUN starts
	Limits     Limits            `json:"limits,omitzero"`    // of each of them
	Timeout    float64           `json:"timeout,omitempty"`  // in seconds, of the whole build; default an hour
	RunTimeout float64           `json:"run_timeout,omitempty"`
}

// BuildStatus says what has become of a step.
type BuildStatus string

// A step is started and then done; or its result was there already.
const (
	BuildStarted BuildStatus = "started"
	BuildCached  BuildStatus = "cached"
	BuildDone    BuildStatus = "done"
)

// BuildEvent is one line of a build's progress. The last line has Image or Error.
type BuildEvent struct {
	Step   int         `json:"step,omitempty"`  // from 1, FROM counts
	Steps  int         `json:"steps,omitempty"` // of all stages that are needed
	Stage  string      `json:"stage,omitempty"` // name, or number from 0
	Line   int         `json:"line,omitempty"`  // of the Dockerfile
	Text   string      `json:"text,omitempty"`  // the instruction
	Status BuildStatus `json:"status,omitempty"`
	Layer  string      `json:"layer,omitempty"` // digest of the layer that the step made, with "done" and "cached"
	WallMS float64     `json:"wall_ms,omitempty"`

	Stream string `json:"stream,omitempty"` // "stdout" or "stderr": output of the program that RUN started
	Output string `json:"output,omitempty"` // that is valid UTF-8
	Data   []byte `json:"data,omitempty"`   // that is not

	Pull  *PullEvent `json:"pull,omitempty"` // of an image that FROM or --from names
	Image *Image     `json:"image,omitempty"`
	Error *Problem   `json:"error,omitempty"`
}
