package api

import "time"

// HostImage is the reference of the image that consists of the host's own read-only /usr.
const HostImage = "host"

// PullImage is the body of POST /v1/images/pull. The answer is one [PullEvent] per line.
type PullImage struct {
	Reference string `json:"reference"`
	Platform  string `json:"platform,omitempty"` // "linux/amd64"; default: the host's
	// Insecure allows plain HTTP, and HTTPS without a verified certificate. Registries on loopback
	// may always use plain HTTP.
	Insecure bool `json:"insecure,omitempty"`
	// Auth replaces the credentials of the daemon's user for this request. It is not kept.
	Auth *RegistryAuth `json:"auth,omitempty"`
}

// RegistryAuth are credentials for the registry of one image. The token replaces name and password.
type RegistryAuth struct {
	Username      string `json:"username,omitempty"`
	Password      string `json:"password,omitempty"`
	IdentityToken string `json:"identity_token,omitempty"` // exchanged for tokens at the registry's token server
}

// CheckRegistry is the body of POST /v1/registries/check.
type CheckRegistry struct {
	Registry string        `json:"registry"`           // address, such as "docker.io" or "registry.example:5000"
	Insecure bool          `json:"insecure,omitempty"` // as in [PullImage]
	Auth     *RegistryAuth `json:"auth,omitempty"`     // as in [PullImage]
}

// RegistryChecked is the answer to POST /v1/registries/check.
type RegistryChecked struct {
	Accepted bool   `json:"accepted"`
	Refusal  string `json:"refusal,omitempty"` // status with which the registry refuses the credentials
}

// PushImage is the body of POST /v1/images/push. The answer is one [PullEvent] per line.
type PushImage struct {
	Reference string `json:"reference"`          // of a stored image, and its destination
	Insecure  bool   `json:"insecure,omitempty"` // as in [PullImage]
	// Platform is the platform to send, such as "linux/amd64". One platform of an image is stored;
	// the push fails if it is a different one. Default: the stored platform.
	Platform string        `json:"platform,omitempty"`
	Auth     *RegistryAuth `json:"auth,omitempty"` // as in [PullImage]
}

// PullEvent is one line of progress of a pull, push or import. The last line has Image, Images or
// Error.
type PullEvent struct {
	Layer  string   `json:"layer,omitempty"`  // digest of the layer
	Status string   `json:"status,omitempty"` // "downloading", "applying", "uploading", "exists", "done"
	Bytes  int64    `json:"bytes,omitempty"`  // so far
	Total  int64    `json:"total,omitempty"`  // of the compressed layer
	Image  *Image   `json:"image,omitempty"`
	Images []Image  `json:"images,omitempty"` // of an import
	Error  *Problem `json:"error,omitempty"`
}

// Image describes a stored image.
type Image struct {
	Reference string    `json:"reference"` // normalised: registry/repository:tag or @digest
	Digest    string    `json:"digest"`    // of the platform's manifest, or of the host image's only layer
	Platform  string    `json:"platform"`
	Size      int64     `json:"size"` // bytes of its compressed blobs
	Layers    int       `json:"layers"`
	PulledAt  time.Time `json:"pulled_at"` // time of the pull or import
	// SharedSize and UniqueSize are the bytes on disk, blobs and unpacked trees. Other images need
	// the shared part; removing the image under all its names frees the unique part. Only lists and
	// inspections set them.
	SharedSize int64 `json:"shared_size,omitempty"`
	UniqueSize int64 `json:"unique_size,omitempty"`
}

// ImageList is the answer to GET /v1/images.
type ImageList struct {
	Images []Image `json:"images"`
}

// ImagesRemoved is the answer to DELETE /v1/images and POST /v1/images/prune.
type ImagesRemoved struct {
	Removed  []string `json:"removed"`            // removed references
	Untagged []string `json:"untagged,omitempty"` // removed references whose image stays, because a sandbox uses it
	Steps    int      `json:"steps,omitempty"`    // removed steps of the build cache
	Bytes    int64    `json:"bytes"`              // freed bytes of blobs and unpacked trees
}

// PruneImages is the optional body of POST /v1/images/prune.
type PruneImages struct {
	All bool `json:"all,omitempty"` // every image without a sandbox, not only those whose tag has moved on
}

// TagImage is the body of POST /v1/images/tag.
type TagImage struct {
	Source string `json:"source"`
	Target string `json:"target"` // registry/repository:tag; an existing image loses the name
}

// ImageDetail is the answer to GET /v1/images/inspect.
type ImageDetail struct {
	Image

	Names   []string       `json:"names"`             // all references of the image
	UsedBy  []string       `json:"used_by,omitempty"` // names of sandboxes
	UsedAt  time.Time      `json:"used_at,omitzero"`  // last creation of a sandbox from it
	Created time.Time      `json:"created,omitzero"`  // as the image states, like the fields below
	Author  string         `json:"author,omitempty"`
	Config  ImageConfig    `json:"config"`
	Parts   []ImageLayer   `json:"parts"` // layers, lowest first
	History []ImageHistory `json:"history"`
}

// ImageConfig is the configuration with which an image is run. Imports of root file systems take it
// from the request.
type ImageConfig struct {
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Cmd        []string          `json:"cmd,omitempty"`
	Env        []string          `json:"env,omitempty"`
	WorkingDir string            `json:"working_dir,omitempty"`
	User       string            `json:"user,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	// Volumes are the paths at which a sandbox of the image has volumes of its own.
	Volumes []string `json:"volumes,omitempty"`
	// Ports are the ports on which the image's program listens, as "80/tcp". Nothing is published by
	// them.
	Ports       []string     `json:"ports,omitempty"`
	StopSignal  string       `json:"stop_signal,omitempty"` // as in [Settings]
	HealthCheck *HealthCheck `json:"health_check,omitempty"`
}

// ImageLayer is one layer of an image.
type ImageLayer struct {
	Digest    string   `json:"digest"` // of the blob
	DiffID    string   `json:"diff_id"`
	ChainID   string   `json:"chain_id"`
	MediaType string   `json:"media_type"`
	Size      int64    `json:"size"`                // of the blob
	TreeSize  int64    `json:"tree_size,omitempty"` // bytes of the unpacked files; 0 if unknown
	SharedBy  []string `json:"shared_by,omitempty"` // other images that need it
}

// ImageHistory is one step of an image's history, as the image states it.
type ImageHistory struct {
	Created    time.Time `json:"created,omitzero"`
	CreatedBy  string    `json:"created_by,omitempty"`
	Comment    string    `json:"comment,omitempty"`
	EmptyLayer bool      `json:"empty_layer,omitempty"`
	Size       int64     `json:"size,omitempty"` // of the layer's blob
}

// ImagesVerified is the answer to GET /v1/images/verify. docs/reference/api.md states the extent of
// the proof.
type ImagesVerified struct {
	Blobs   int   `json:"blobs"`   // blobs that were read
	Bytes   int64 `json:"bytes"`   // their total size
	Layers  int   `json:"layers"`  // layers whose trees were compared
	Entries int64 `json:"entries"` // entries of trees that were examined
	Unseen  int64 `json:"unseen"`  // entries that only the sandboxes' own IDs may read
	// Snapshots counts the snapshot layers that were read. Each must equal its state at the time of
	// its creation; no blob exists to compare it with.
	Snapshots int            `json:"snapshots"`
	Problems  []ImageProblem `json:"problems"`
}

// ImageProblem describes a damaged blob or tree.
type ImageProblem struct {
	Images []string `json:"images"` // images that need it; "snapshot NAME" for a snapshot
	Digest string   `json:"digest"` // of the blob, or chain ID of the tree
	Detail string   `json:"detail"`
}

// ImagesImported is the answer to POST /v1/images/import; with progress=true the answer is one
// [PullEvent] per line instead.
type ImagesImported struct {
	Images []Image `json:"images"`
}
