package inside

import (
	"testing"

	"github.com/sandboxd/sandboxd/internal/guest"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// Rights that are taken away and returned, for each version of Landlock with more rights than the
// one before.
func TestLandlockPlan(t *testing.T) {
	const (
		block    = unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK
		refer    = unix.LANDLOCK_ACCESS_FS_REFER
		truncate = unix.LANDLOCK_ACCESS_FS_TRUNCATE
		device   = unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
		file     = unix.LANDLOCK_ACCESS_FS_WRITE_FILE
		write    = 0x1ff4&^block | refer // all but EXECUTE, READ_FILE and READ_DIR, which are 1, 4 and 8
		scoped   = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
	)
	const all = (write &^ 0xc) | file
	for name, tc := range map[string]struct {
		c    guest.Confinement
		want landlockPlan
	}{
		"the first that is used": {guest.Confinement{ABI: 2}, landlockPlan{
			Handled: unix.LandlockRulesetAttr{Handled_access_fs: block | refer}, Rules: []landlockRule{{"/", refer}, {"/dev", 0}},
		}},
		"with devices": {guest.Confinement{ABI: 5}, landlockPlan{
			Handled: unix.LandlockRulesetAttr{Handled_access_fs: block | refer | device}, Rules: []landlockRule{{"/", refer}, {"/dev", device}},
		}},
		"with scopes": {guest.Confinement{ABI: 6}, landlockPlan{
			Handled: unix.LandlockRulesetAttr{Handled_access_fs: block | refer | device, Scoped: scoped},
			Rules:   []landlockRule{{"/", refer}, {"/dev", device}},
		}},
		"a read-only root, first": {guest.Confinement{ABI: 2, Writable: []string{"/tmp"}}, landlockPlan{
			Handled: unix.LandlockRulesetAttr{Handled_access_fs: all | block},
			Rules:   []landlockRule{{"/dev", file}, {"/dev/shm", all}, {"/tmp", all}},
		}},
		"a read-only root": {guest.Confinement{ABI: 9, Writable: []string{"/tmp", "/work"}}, landlockPlan{
			Handled: unix.LandlockRulesetAttr{Handled_access_fs: all | block | truncate | device, Scoped: scoped},
			Rules: []landlockRule{
				{"/dev", file | truncate | device}, {"/dev/shm", all | truncate}, {"/tmp", all | truncate}, {"/work", all | truncate},
			},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, planLandlock(&tc.c)); diff != "" {
				t.Error(diff)
			}
		})
	}
}
