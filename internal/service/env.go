package service

import (
	"slices"
	"strings"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// execEnv is the complete environment of a program. Each list overrules those before it: what
// programs expect, the image, the user's home, the sandbox, the exec. Without a home, init adds that
// of the user that it looks up, unless the sandbox or the exec has one.
func execEnv(imageEnv, sandboxEnv, requestEnv []string, home string, tty bool) []string {
	base := []string{"PATH=" + defaultPath}
	if tty {
		base = append(base, "TERM=xterm")
	}
	if home == "" {
		imageEnv = slices.DeleteFunc(slices.Clone(imageEnv), func(kv string) bool { return strings.HasPrefix(kv, "HOME=") })
		return mergeEnv(base, imageEnv, sandboxEnv, requestEnv)
	}
	return mergeEnv(base, imageEnv, []string{"HOME=" + home}, sandboxEnv, requestEnv)
}

// mergeEnv keeps the last value of each name, at the place of the first. Entries without a name are
// dropped: an image may hold them, and execve would pass them on.
func mergeEnv(lists ...[]string) []string {
	var merged []string
	at := make(map[string]int)
	for _, list := range lists {
		for _, kv := range list {
			k, _, ok := strings.Cut(kv, "=")
			if !ok || k == "" || strings.IndexByte(kv, 0) >= 0 {
				continue
			}
			if i, seen := at[k]; seen {
				merged[i] = kv
				continue
			}
			at[k] = len(merged)
			merged = append(merged, kv)
		}
	}
	return merged
}
