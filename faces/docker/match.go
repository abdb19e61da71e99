package docker

import (
	"regexp"
	"strings"
)

// matchName reports whether the name of a container fits the filter, which is a regular expression
// on the name with or without its slash.
func matchName(want, name string) bool {
	if len(want) > 256 {
		return false
	}
	expr, err := regexp.Compile(want)
	if err != nil {
		return strings.TrimPrefix(want, "/") == name
	}
	return expr.MatchString(name) || expr.MatchString("/"+name)
}
