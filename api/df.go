package api

// DiskUsage is the answer to GET /v1/system/df: the bytes on disk of the caller's objects. A layer
// or blob that several objects share is counted once: for images before the build cache, and for
// snapshots.
type DiskUsage struct {
	Images     DiskShare `json:"images"`
	BuildCache DiskShare `json:"build_cache"` // layers of build steps that no image needs, and caches of RUN
	Snapshots  DiskShare `json:"snapshots"`   // their layers
	Sandboxes  DiskShare `json:"sandboxes"`   // files that programs have written or changed
	Logs       DiskShare `json:"logs"`        // output of main processes
	Volumes    DiskShare `json:"volumes"`     // their files; those that no sandbox has are reclaimable
	// Files has a line for each sandbox, oldest first.
	Files []SandboxFiles `json:"files"`
	// VolumeFiles has a line for each volume, by name.
	VolumeFiles []VolumeFiles `json:"volume_files"`
}

// VolumeFiles is the disk space of one volume.
type VolumeFiles struct {
	Name      string `json:"name"`
	Bytes     int64  `json:"bytes"`     // of allocated blocks
	Inodes    int64  `json:"inodes"`    // number of files, directories and links
	Sandboxes int    `json:"sandboxes"` // number of those that have it
	// Unknown is the reason why Bytes and Inodes are not known.
	Unknown string `json:"unknown,omitempty"`
}

// DiskShare is the part of one kind of object.
type DiskShare struct {
	Count  int   `json:"count"`
	Active int   `json:"active"` // number of those in use: images and snapshots of sandboxes, sandboxes that have not ended
	Bytes  int64 `json:"bytes"`
	// Reclaimable is the number of bytes that go when all that is not in use is removed.
	Reclaimable int64 `json:"reclaimable"`
}

// SandboxFiles is the disk space of one sandbox, without its image and snapshots.
type SandboxFiles struct {
	ID    string       `json:"id"`
	Name  string       `json:"name"`
	State SandboxState `json:"state"`
	Bytes int64        `json:"bytes"` // sizes of the files that it has written or changed, holes included
	Files int64        `json:"files"` // number of these, with directories and deletions
	Log   int64        `json:"log"`   // bytes
	// Unknown is the reason why Bytes and Files are not known.
	Unknown string `json:"unknown,omitempty"`
}
