// Package rootfs holds the description of a sandbox's root file system, the value that image and
// runtime share.
package rootfs

import (
	"fmt"
	"slices"
	"strings"
)

// Source names the read-only parts of a rootfs. It holds no path of the data directory: the
// launcher alone knows where layers lie, and finds them by chain id.
type Source struct {
	// Layers are chain ids ("sha256:<hex>") of extracted layers, lowest first, at least one.
	Layers []string `json:"layers"`
	// HostDirs are directories of the host (absolute, e.g. "/usr") that appear at the same place
	// read-only below the layers' own content. Only the host image has them; the launcher accepts no
	// others than [HostDirs].
	HostDirs []string `json:"host_dirs,omitempty"`
	// Snapshots are the diff ids of the uppermost layers, those that were made of sandboxes, lowest
	// first. The other layers are the image's.
	Snapshots []string `json:"snapshots,omitempty"`
}

// MaxLayers is the number of layers that fit into one mount of an overlay with all their names.
const MaxLayers = 54

// Clone returns a copy that shares nothing.
func (s *Source) Clone() Source {
	return Source{Layers: slices.Clone(s.Layers), HostDirs: slices.Clone(s.HostDirs), Snapshots: slices.Clone(s.Snapshots)}
}

// Equal reports whether both are made of the same.
func (s *Source) Equal(o *Source) bool {
	return slices.Equal(s.Layers, o.Layers) && slices.Equal(s.HostDirs, o.HostDirs) && slices.Equal(s.Snapshots, o.Snapshots)
}

// Below returns the source without its highest n layers, which must be snapshots'.
func (s *Source) Below(n int) Source {
	return Source{
		Layers: slices.Clone(s.Layers[:len(s.Layers)-n]), HostDirs: slices.Clone(s.HostDirs), Snapshots: slices.Clone(s.Snapshots[:len(s.Snapshots)-n]),
	}
}

// Upon is the source with one more layer, a snapshot of that diff id.
func (s *Source) Upon(chainID, diffID string) Source {
	up := s.Clone()
	up.Layers, up.Snapshots = append(up.Layers, chainID), append(up.Snapshots, diffID)
	return up
}

// Taken are the chain ids of the layers that are snapshots', lowest first.
func (s *Source) Taken() []string { return s.Layers[len(s.Layers)-len(s.Snapshots):] }

// HostDirs is the closed list of host directories that the host image may show.
var HostDirs = []string{"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"}

// LayerName is the name of a layer's directory: the hex half of its chain id. Anything but
// "sha256:<64 hex digits>" is an error, so the name cannot be a path.
func LayerName(chainID string) (string, error) {
	hex, ok := strings.CutPrefix(chainID, "sha256:")
	if !ok || len(hex) != 64 || strings.Trim(hex, "0123456789abcdef") != "" {
		return "", fmt.Errorf("chain id %q is not sha256:<64 hex digits>", chainID)
	}
	return hex, nil
}
