package api

import "time"

// Volume is a directory that sandboxes of one tenant share, and that stays when they are deleted.
type Volume struct {
	Name      string            `json:"name"`
	Labels    map[string]string `json:"labels,omitempty"`
	CreatedAt time.Time         `json:"created_at"`
	// Size is the maximum disk space of its files in bytes, Inodes their maximum number; 0 means none.
	// Beyond it the sandboxes that can write to the volume are ended. See [Limits].
	Size   int64 `json:"size,omitempty"`
	Inodes int64 `json:"inodes,omitempty"`
	// Anonymous means that its name was made up. Prune removes such a volume without being asked for
	// all.
	Anonymous bool `json:"anonymous,omitempty"`
	// Bound means that it was made with a sandbox, and is removed with the last one that has it.
	Bound bool `json:"bound,omitempty"`
	// Sandboxes are those that have it, running or not. It is not removed while there are any.
	Sandboxes []SandboxRef `json:"sandboxes"`
	// Usage is in the answer about a single volume.
	Usage *VolumeUsage `json:"usage,omitempty"`
}

// VolumeUsage is the disk space of a volume's files, counted for the answer.
type VolumeUsage struct {
	Bytes  int64 `json:"bytes"` // of allocated blocks
	Inodes int64 `json:"inodes"`
	// Unknown is the reason why they are not known.
	Unknown string `json:"unknown,omitempty"`
}

// VolumeList is the answer to GET /v1/volumes, by name.
type VolumeList struct {
	Volumes []Volume `json:"volumes"`
}

// CreateVolume is the body of POST /v1/volumes. If there is a volume of the name with these values,
// it is the answer.
type CreateVolume struct {
	// Name has up to 128 letters, digits, '_', '.' and '-', and begins with a letter or digit. Default:
	// one is made up, and the volume is anonymous.
	Name   string            `json:"name,omitempty"`
	Labels map[string]string `json:"labels,omitempty"` // as a sandbox's
	Size   int64             `json:"size,omitempty"`   // see [Volume]; default: none, or the daemon's
	Inodes int64             `json:"inodes,omitempty"` // default: one for each 8 KiB of Size, and at least 10,000
}

// PruneVolumes is the optional body of POST /v1/volumes/prune. It removes volumes that no sandbox
// has.
type PruneVolumes struct {
	// All removes named ones too, and not only anonymous ones.
	All bool `json:"all,omitempty"`
	// Labels are the labels that they must have. Volumes with [LabelKeep] always stay.
	Labels map[string]string `json:"labels,omitempty"`
}

// VolumesRemoved is the answer to POST /v1/volumes/prune.
type VolumesRemoved struct {
	Removed []string `json:"removed"` // names
	Bytes   int64    `json:"bytes"`   // disk space of the removed files, as far as it was known
}

// VolumeImported is the answer to POST /v1/volumes/import.
type VolumeImported struct {
	Volume
	Files int64 `json:"files"` // number of entries that were unpacked
	Bytes int64 `json:"bytes"` // of their contents
	// Skipped lists entries that no volume can have, such as devices, as in [SandboxCommitted].
	Skipped     []string `json:"skipped,omitempty"`
	SkippedMore int64    `json:"skipped_more,omitempty"`
}
