package api

// Build holds the options of a build. It is the parameter "options" of POST /v1/builds, as JSON;
// the body is the context, a tar stream. The answer is one [BuildEvent] per line.
type Build struct {
	Tags []string `json:"tags,omitempty"` // names of the image; default: localhost/build@sha256:...
	// Dockerfile is its path in the context; default: Dockerfile. A file called
	// ".sandboxd-dockerfile" is not part of the context: no COPY sees it.
	Dockerfile string            `json:"dockerfile,omitempty"`
	Target     string            `json:"target,omitempty"` // name or number of a stage; default: the last
	Args       map[string]string `json:"args,omitempty"`   // for ARG; SOURCE_DATE_EPOCH sets all times
	Labels     map[string]string `json:"labels,omitempty"` // of the image
	NoCache    bool              `json:"no_cache,omitempty"`
	Platform   string            `json:"platform,omitempty"` // a platform that this host runs
	Network    Network           `json:"network,omitzero"`   // of the programs of RUN
	Limits     Limits            `json:"limits,omitzero"`    // of each of these programs
	Timeout    float64           `json:"timeout,omitempty"`  // seconds for the whole build; default: an hour
	RunTimeout float64           `json:"run_timeout,omitempty"`
	// Secrets are for RUN --mount=type=secret, by their id. They are no part of the options, which
	// proxies log: the request has them in the header [HeaderBuildSecrets].
	Secrets map[string][]byte `json:"-"`
}

// HeaderBuildSecrets is the request header with the secrets of a build: the base64 encoding (RFC
// 4648, standard, padded) of a JSON object that has the base64 encoding of each secret by its id.
const HeaderBuildSecrets = "Sandboxd-Build-Secrets" //nolint:gosec // G101: the name of a header

// MaxBuildSecrets is the greatest length of [HeaderBuildSecrets] in bytes.
const MaxBuildSecrets = 48 << 10

// BuildStatus is the progress of a step.
type BuildStatus string

// States of a step. A step is either started and then done, or cached.
const (
	BuildStarted BuildStatus = "started"
	BuildCached  BuildStatus = "cached"
	BuildDone    BuildStatus = "done"
)

// BuildEvent is one line of a build's progress. The last line has Image or Error.
type BuildEvent struct {
	Step   int         `json:"step,omitempty"`  // number from 1; FROM counts
	Steps  int         `json:"steps,omitempty"` // steps of all stages that are needed
	Stage  string      `json:"stage,omitempty"` // name, or number from 0
	Line   int         `json:"line,omitempty"`  // line of the Dockerfile
	Text   string      `json:"text,omitempty"`  // instruction
	Status BuildStatus `json:"status,omitempty"`
	Layer  string      `json:"layer,omitempty"` // digest of the step's layer, with "done" and "cached"
	WallMS float64     `json:"wall_ms,omitempty"`

	Stream string `json:"stream,omitempty"` // "stdout" or "stderr" of a RUN program
	Output string `json:"output,omitempty"` // output that is valid UTF-8
	Data   []byte `json:"data,omitempty"`   // output that is not

	Pull  *PullEvent `json:"pull,omitempty"` // pull of an image that FROM or --from names
	Image *Image     `json:"image,omitempty"`
	Error *Problem   `json:"error,omitempty"`
}
