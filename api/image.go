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

// PullEvent is one line of progress. The last line has Image or Error.
type PullEvent struct {
	Layer  string   `json:"layer,omitempty"`  // digest of the layer this is about
	Status string   `json:"status,omitempty"` // "downloading", "applying", "exists", "done"
	Bytes  int64    `json:"bytes,omitempty"`  // so far
	Total  int64    `json:"total,omitempty"`  // of the compressed layer
	Image  *Image   `json:"image,omitempty"`
	Error  *Problem `json:"error,omitempty"`
}

// Image is what the API shows of a stored image.
type Image struct {
	Reference string    `json:"reference"` // normalised: registry/repository:tag or @digest
	Digest    string    `json:"digest"`    // of the platform's manifest
	Platform  string    `json:"platform"`
	Size      int64     `json:"size"` // bytes of its blobs, compressed
	Layers    int       `json:"layers"`
	PulledAt  time.Time `json:"pulled_at"`
}

// ImageList is the answer to GET /v1/images.
type ImageList struct {
	Images []Image `json:"images"`
}
