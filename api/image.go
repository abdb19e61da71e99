package api

import "time"

// HostImage is the reference of the image made of the host's own read-only /usr.
const HostImage = "host"

// PullImage is the body of POST /v1/images/pull. The answer is one [PullEvent] a line.
type PullImage struct {
	Reference string `json:"reference"`
	Platform  string `json:"platform,omitempty"` // "linux/amd64"; default: the host's
	// Insecure allows plain HTTP, and HTTPS without a verified certificate. Registries on loopback may always use plain HTTP.
	Insecure bool `json:"insecure,omitempty"`
}

// PushImage is the body of POST /v1/images/push. The answer is one [PullEvent] a line.
type PushImage struct {
	Reference string `json:"reference"`          // of a stored image; also where it goes
	Insecure  bool   `json:"insecure,omitempty"` // as in [PullImage]
	// Platform is the one that is to be sent, "linux/amd64". What is stored of an image is one platform: where that is another
	// one the push is refused. Default: whichever is stored.
	Platform string `json:"platform,omitempty"`
}

// PullEvent is one line of progress of a pull, push or import. The last line has Image, Images or Error.
type PullEvent struct {
	Layer  string   `json:"layer,omitempty"`  // digest of the layer this is about
	Status string   `json:"status,omitempty"` // "downloading", "applying", "uploading", "exists", "done"
	Bytes  int64    `json:"bytes,omitempty"`  // so far
	Total  int64    `json:"total,omitempty"`  // of the compressed layer
	Image  *Image   `json:"image,omitempty"`
	Images []Image  `json:"images,omitempty"` // of an import
	Error  *Problem `json:"error,omitempty"`
}

// Image is what the API shows of a stored image.
type Image struct {
	Reference string    `json:"reference"` // normalised: registry/repository:tag or @digest
	Digest    string    `json:"digest"`    // of the platform's manifest; of the host image's only layer
	Platform  string    `json:"platform"`
	Size      int64     `json:"size"` // bytes of its blobs, compressed
	Layers    int       `json:"layers"`
	PulledAt  time.Time `json:"pulled_at"` // or imported
	// What it takes on disk, blobs and unpacked trees: SharedSize is needed by other images too, UniqueSize would be freed
	// by its removal, under all its names. Only lists and inspections have them.
	SharedSize int64 `json:"shared_size,omitempty"`
	UniqueSize int64 `json:"unique_size,omitempty"`
}

// ImageList is the answer to GET /v1/images.
type ImageList struct {
	Images []Image `json:"images"`
}

// ImagesRemoved is the answer to DELETE /v1/images and POST /v1/images/prune.
type ImagesRemoved struct {
	Removed  []string `json:"removed"`            // references that are gone
	Untagged []string `json:"untagged,omitempty"` // references that are gone while their image stays, because a sandbox has it
	Steps    int      `json:"steps,omitempty"`    // of builds, that were kept to be quicker the next time
	Bytes    int64    `json:"bytes"`              // that are free again: blobs and unpacked trees
}

// PruneImages is the body of POST /v1/images/prune, which may be left out.
type PruneImages struct {
	All bool `json:"all,omitempty"` // every image that no sandbox has, not only those whose tag has moved on
}

// TagImage is the body of POST /v1/images/tag.
type TagImage struct {
	Source string `json:"source"`
	Target string `json:"target"` // registry/repository:tag; an image that has this name loses it
}

// ImageDetail is the answer to GET /v1/images/inspect.
type ImageDetail struct {
	Image

	Names   []string       `json:"names"`             // all references of this image
	UsedBy  []string       `json:"used_by,omitempty"` // names of sandboxes
	UsedAt  time.Time      `json:"used_at,omitzero"`  // when a sandbox was last made of it
	Created time.Time      `json:"created,omitzero"`  // as its maker says, like all that follows
	Author  string         `json:"author,omitempty"`
	Config  ImageConfig    `json:"config"`
	Parts   []ImageLayer   `json:"parts"` // its layers, lowest first
	History []ImageHistory `json:"history"`
}

// ImageConfig is how an image wants to be run. Imports of root file systems take it from the request.
type ImageConfig struct {
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Cmd        []string          `json:"cmd,omitempty"`
	Env        []string          `json:"env,omitempty"`
	WorkingDir string            `json:"working_dir,omitempty"`
	User       string            `json:"user,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
}

// ImageLayer is one layer of an image.
type ImageLayer struct {
	Digest    string   `json:"digest"` // of the blob
	DiffID    string   `json:"diff_id"`
	ChainID   string   `json:"chain_id"`
	MediaType string   `json:"media_type"`
	Size      int64    `json:"size"`                // of the blob
	TreeSize  int64    `json:"tree_size,omitempty"` // of the files, unpacked; 0 where it is not known
	SharedBy  []string `json:"shared_by,omitempty"` // other images that need it
}

// ImageHistory is one step of an image's making, as its maker tells it.
type ImageHistory struct {
	Created    time.Time `json:"created,omitzero"`
	CreatedBy  string    `json:"created_by,omitempty"`
	Comment    string    `json:"comment,omitempty"`
	EmptyLayer bool      `json:"empty_layer,omitempty"`
	Size       int64     `json:"size,omitempty"` // of the layer's blob
}

// ImagesVerified is the answer to GET /v1/images/verify. docs/reference/api.md lists what is proved.
type ImagesVerified struct {
	Blobs   int   `json:"blobs"`   // that were read
	Bytes   int64 `json:"bytes"`   // of them
	Layers  int   `json:"layers"`  // whose trees were compared
	Entries int64 `json:"entries"` // that were looked at in trees
	Unseen  int64 `json:"unseen"`  // entries that only the sandboxes' own ids may look at
	// Snapshots are layers of snapshots that were read. Each must read as it did when it was taken, in all that it has: there
	// is no blob to compare it with.
	Snapshots int            `json:"snapshots"`
	Problems  []ImageProblem `json:"problems"`
}

// ImageProblem is something that is not what it was.
type ImageProblem struct {
	Images []string `json:"images"` // that need it; "snapshot NAME" is one
	Digest string   `json:"digest"` // of the blob, or the chain id of the tree
	Detail string   `json:"detail"`
}

// ImagesImported is the answer to POST /v1/images/import; with progress=true that is one [PullEvent] a line instead.
type ImagesImported struct {
	Images []Image `json:"images"`
}
