//go:build !mutant

package libct

import "github.com/opencontainers/runc/libcontainer/configs"

// mutate is for the build that tests are tested with (mutant.go); in every other it does nothing.
func mutate(string, *configs.Config) {}

// mutantFlags are the mount flags that a mutant leaves out: none.
func mutantFlags(string) uintptr { return 0 }
