package seccomp

import "slices"

// Launcher is the filter of the launcher itself: what starting sandboxes takes, and what any
// profile may let through, for filters are inherited: whatever a profile says, its sandboxes are
// held by this one too.
//
// It permits its calls with all arguments, but for sockets. The kernel remembers such calls in a
// bitmap and runs no program for them (Linux 5.11), so that sandboxes do not pay for a second
// filter; see docs/decisions/0017-the-launcher-has-a-filter.md.
func Launcher() Filter {
	f := Filter{Name: "launcher"}
	var decided []string
	for _, g := range slices.Concat(conditional(), fallocateGroups()) {
		switch {
		case slices.Contains(g.Calls, "socket") || slices.Contains(g.Calls, "socketpair"):
			f.Groups = append(f.Groups, g)
		case g.allows():
			decided = append(decided, g.Calls...)
		}
	}
	slices.Sort(decided)
	f.Groups = slices.Concat(allowed(), f.Groups, []Group{
		{Reason: "what a sandbox's own filter decides by the arguments", Calls: slices.Compact(decided)},
		{Reason: "namespaces, which libcontainer makes and enters", Calls: []string{"clone3", "setns", "unshare"}},
		{Reason: "the launcher's root and those of sandboxes", Calls: []string{
			"chroot", "fsconfig", "fsmount", "fsopen", "mount", "mount_setattr", "move_mount", "open_tree", "pivot_root", "umount2",
		}},
		{Reason: "the name of a sandbox", Calls: []string{"setdomainname", "sethostname"}},
		{Reason: "not the launcher's, but a profile may let it through", Calls: tolerated},
	})
	return f
}

// calls returns the calls that a filter permits, with some arguments at least.
func (f Filter) calls(arch string) (all []string) {
	for _, g := range f.Groups {
		if g.allows() && (g.Only == "" || g.Only == arch) {
			all = append(all, g.Calls...)
		}
	}
	return all
}

// tolerated are calls that no profile of ours lets through, and that one's own may: for the places
// of memory, and for the old asynchronous I/O, of which all of a host have fs.aio-max-nr together.
var tolerated = []string{
	"get_mempolicy", "io_cancel", "io_destroy", "io_getevents", "io_pgetevents", "io_setup", "io_submit", "kcmp", "listmount", "mbind",
	"migrate_pages", "move_pages", "process_madvise", "set_mempolicy", "set_mempolicy_home_node", "statmount",
}
