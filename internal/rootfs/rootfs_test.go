package rootfs

import (
	"strings"
	"testing"
)

func TestLayerNameIsOnlyADigest(t *testing.T) {
	good := strings.Repeat("0123456789abcdef", 4)
	if got, err := LayerName("sha256:" + good); err != nil || got != good {
		t.Errorf("LayerName of a digest: %q, %v", got, err)
	}
	for _, bad := range []string{
		"", good, "sha256:", "sha256:../" + good[3:], "sha512:" + good, "sha256:" + good + "0", "sha256:" + good + "/..",
		"sha256:" + strings.ToUpper(good),
	} {
		if got, err := LayerName(bad); err == nil {
			t.Errorf("LayerName(%q) = %q, want an error", bad, got)
		}
	}
}
