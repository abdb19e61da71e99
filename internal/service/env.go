package service

import (
	"slices"
	"strings"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// execEnv is the complete environment of a program. Each list overrules those before it: what
// programs expect, the image, the user's home, the sandbox, the exec. A name without a value takes
// the variable away. Without a home, init adds that of the user that it looks up, unless the
// sandbox or the exec has one.
func execEnv(imageEnv, sandboxEnv, requestEnv []string, home string, tty bool) []string {
	base := []string{"PATH=" + defaultPath}
	if tty {
		base = append(base, "TERM=xterm")
	}
	// Names without a value in an image mean nothing.
	imageEnv = slices.DeleteFunc(slices.Clone(imageEnv), func(kv string) bool {
		return valueless(kv) || home == "" && strings.HasPrefix(kv, "HOME=")
	})
	user := []string{}
	if home != "" {
		user = append(user, "HOME="+home)
	}
	return slices.DeleteFunc(mergeEnv(base, imageEnv, user, sandboxEnv, requestEnv), valueless)
}

func valueless(kv string) bool { return !strings.Contains(kv, "=") }

// mergeEnv keeps the last entry of each name, at the place of the first, also one without a value.
// Entries without a name are dropped: an image may hold them, and execve would pass them on.
func mergeEnv(lists ...[]string) []string {
	var merged []string
	at := make(map[string]int)
	for _, list := range lists {
		for _, kv := range list {
			k, _, _ := strings.Cut(kv, "=")
			if k == "" || strings.IndexByte(kv, 0) >= 0 {
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
