// Package rootfs is the one value that image and runtime share: what a sandbox's root file system is made of.
package rootfs

// Source names the read-only parts of a rootfs. It holds no path of the data directory: the launcher alone knows where
// layers lie, and finds them by chain id.
type Source struct {
	// Layers are chain ids ("sha256:<hex>") of extracted layers, lowest first, at least one.
	Layers []string `json:"layers"`
	// HostDirs are directories of the host (absolute, e.g. "/usr") that appear at the same place read-only below the
	// layers' own content. Only the host image has them; the launcher accepts no others than [HostDirs].
	HostDirs []string `json:"host_dirs,omitempty"`
}

// HostDirs is the closed list of host directories that the host image may show.
var HostDirs = []string{"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"}
