// Package launcher is the protocol between the daemon and the launcher, both sides of it.
//
// host_*.go runs in the daemon, launcher_*.go in the launcher, protocol.go is shared.
//
// # Theory of operation
//
// The launcher is root of a user namespace of its own and PID 1 of a PID namespace of its own, so
// the kernel itself ends every sandbox when it dies. It outlives the daemon: a new daemon connects
// to the same socket and adopts the running sandboxes.
//
// Starting it takes three steps, because maps of subordinate ids can only be written from outside:
//
//	daemon                                     launcher
//	  clone(NEWUSER|NEWNS|NEWPID|NEWNET|…) ──▶  stage 1: has no id yet, waits
//	  newuidmap, newgidmap, cgroup.procs
//	  ── one byte on the sync pipe ──────────▶  opens its directories, becomes uid 0, copies itself into a sealed memfd
//	                                            and executes that: stage 2, with all capabilities in its namespace
//	                                            builds a root of its own (tmpfs; layers, sandboxes, /host, /proc, /sys,
//	                                            /dev) and pivots into it: nothing else of the host is reachable
//	  ◀───────── "ready" on the status pipe ──  serves its socket
//
// Silence means death: end of file on the sync pipe ends stage 1, on the status pipe it is a failed
// start.
//
// Then every request of the daemon is a connection of its own (SOCK_SEQPACKET, one JSON message one
// packet, descriptors by SCM_RIGHTS): connect, one request, one answer, close. The connection of a
// session request stays open as long as the daemon lives; a launcher without session and without
// sandboxes ends itself after a minute.
//
//	── create {spec} filter + control socket ─▶  the seccomp filter follows as JSON of its own
//	◀── {started} + pidfd of the init ──────
//	── start {spec} filter + control socket ──▶  one that has ended, in the directories that it left
//	◀── {started} + pidfd of the init ──────
//	── stop {id, grace} ───────────────────▶  SIGTERM to all but the init; after the grace the kernel kills the rest
//	◀── {} ─────────────────────────────────  everything has ended
//	── list ───────────────────────────────▶
//	◀── {started…} + one pidfd each ────────
//	── apply {parents, layers…} + blobs ───▶  unpacks each in a confined child of its own (stage "apply")
//	◀── {diff id, bytes, entries}… ─────────  all of them are on disk and have their names, or none has
//	── diff {id, rootfs, …} + pipe ────────▶  reads the upper directories in a confined child (stage "diff"), which
//	                                          writes the layer, or the list of changes, to the pipe
//	◀── {bytes, entries} ───────────────────  all has been written
//	── snapshot {diff, chain id} ──────────▶  a "diff" child writes and an "apply" child unpacks, at once, with a pipe
//	                                          between them that no third process reads
//	◀── {diff id, bytes, entries}, frozen ──  the layer is complete and synced
//	── update {id, change} ────────────────▶  all of it or nothing; a hostname is set in the sandbox's UTS namespace
//	◀── {enforced} ─────────────────────────
//	── pause {id} ─────────────────────────▶  by the freezer, or by SIGSTOP where there is no cgroup
//	◀── {} ─────────────────────────────────  every process stands still; list tells of it
//	── deposit {sandbox, name} + 1 to 8 descriptors ─▶  copies are kept; they replace the set of that name
//	◀── {} ─────────────────────────────────
//	── withdraw {after} ────────────────────▶
//	◀── {deposits…} + their descriptors ────  copies; asked again while there are more
//	── drop {sandbox, name} ───────────────▶
//	◀── {} ─────────────────────────────────
//	── range {number} + 2 mounts ───────────▶  verifies and keeps them: sandboxes may run under that range of host ids
//	◀── {} ─────────────────────────────────
//	── network {id} ────────────────────────▶
//	◀── {sockets} + 3 sockets ──────────────  copies of those at which its connections end: TCP, DNS, DNS over TCP
//	── network-socket {id, socket} ─────────▶  "tcp", "udp" or "diag"
//	◀── {sockets} + a socket ───────────────  made inside the sandbox's network namespace
//	── volume {action, id} ─────────────────▶  removes or counts a volume; reads its archive to a pipe, or writes it from one
//	◀── {usage | layer} ────────────────────
//	── resume | leftovers | delete | kill | stats | remove-layer | info | shutdown ──▶
//	◀── {} ─────────────────────────────────
//
// Closing the connection before the answer cancels some requests. Apply and diff end, their child
// is killed and a frozen sandbox thawed; the grace of a stop is over; a layer that another request
// extracts is not removed. A sandbox is frozen for a diff for 15 minutes at most, after which the
// diff fails. The other requests take milliseconds and are completed in any case.
//
// Deposit, withdraw and drop work on the launcher's descriptor store, which is like systemd's. A
// daemon leaves its successor the descriptors of each detached exec: init's connection, the ends of
// its pipes, and the files of memory with its output and record (package guest/host says how no
// byte is lost). The launcher reads none of them. It keeps 64 sets of a sandbox and 512 in all,
// until they are dropped, their sandbox is deleted, or it ends itself.
//
// # Host ids of sandboxes
//
// With mapped mounts each running sandbox has a range of host ids to itself. Only root of the host
// may make these mounts, so that they come from the daemon's broker:
//
//	daemon                                     launcher
//	  ── create {spec} ─────────────────────▶  every range that has mounts has a sandbox too
//	  ◀── error "wants-range", number ───────
//	  broker: mounts for that number
//	  ── range {number} + 2 mounts ─────────▶  attaches them in a mount namespace of their own
//	  ── create {spec} ─────────────────────▶  copies them for the sandbox's first process, which attaches them in the
//	                                           sandbox's mount namespace, mounts the overlays, and leaves them behind
//
// A sandbox with mounts of the host's files is asked for twice. The launcher holds its range of ids
// meanwhile, and verifies flags and owner of each mount before it attaches it:
//
//	daemon                                   launcher
//	  ── create {spec} + control ──────────▶
//	  ◀── error "wants-mounts", number ────
//	  (the broker makes the mounts for that range)
//	  ── create {spec} + control + mounts ─▶
//
// The first range comes with the launcher's start: see [Ranges].
//
// # Networks of sandboxes
//
// A sandbox with a network joins a namespace of package netns. Its rules take a netlink socket that
// the launcher's filter refuses to the launcher and to all sandboxes. So a child makes the
// namespaces, the maker, which is started before that filter is loaded:
//
//	launcher                                   maker
//	  clone(NEWNS|NEWPID|NEWIPC|NEWUTS|NEWCGROUP) ──▶
//	                                           first stage ("network"): a root with nothing but /proc, of which
//	                                           /proc/sys/net alone is writable; three capabilities of the launcher's
//	                                           user namespace; Landlock, where the kernel has it
//	                                           second stage ("network-confined"): checks its capabilities, loads its
//	                                           filter, makes a namespace for a try
//	  ◀── {} or {error} ──────────────────────
//	  ── {} ──────────────────────────────────▶  a request has no content
//	  ◀── {} + 4 descriptors, or {error} ─────  namespace and sockets
//
// The launcher verifies the descriptors, and never starts a second maker: no child of a confined
// launcher could be one. If the maker cannot make a namespace, or has ended, sandboxes with a
// network are refused with the reason, which info has too. Silence ends either side: the maker at
// the end of file of its socket, the launcher's trust after a minute.
//
// From the first use on, some namespaces are made ahead. The launcher holds those of running
// sandboxes, so that their networks outlive the daemon, and closes them when the sandbox ends. A
// new daemon asks for the sockets of each sandbox that it adopts. A new start makes a new network.
//
// A launcher of an earlier version does not know the field network of a spec, or these requests: it
// answers that it has not understood, and starts nothing.
//
// # Layers that come together
//
// The layers of an apply are unpacked into directories without names, two at a time, while the file
// system is synced every half second. A child reads its stream whatever becomes of the layers
// below; the steps that depend on those come last:
//
//	child of layer n                           launcher
//	  files, directories, whiteouts
//	  waits for a byte on its gate, a pipe ◀── layers up to n-1 are complete
//	  compares with the layers below
//	  ── {diff id, …} on its report ──────────▶ opens the gate of n+1
//	                                           after the last: syncfs, a rename each, a sync of the directory of layers
//
// The end of the gate without a byte, or a kill, means that a layer below has failed, or that the
// request was cancelled.
//
// # The child that unpacks layers
//
// It reads the most hostile input there is, and is held by fences that do not rest on each other:
//
//	launcher ── clone(NEWUSER|NEWNS|NEWPID|NEWNET|NEWIPC|NEWUTS|NEWCGROUP): the sandbox's ids, nothing else ──▶
//	  first stage ("apply")            marks every descriptor but the stream, the gate and the report's pipes to be closed
//	                                   copies the mounts of the layers below, read-only, attached nowhere
//	                                   pivots into the layer's directory: the old root is gone
//	                                   drops all capabilities but those that owning files takes; no_new_privs
//	                                   Landlock, where the kernel has it: files below that directory, nothing to execute,
//	                                   and only the names of the layers below
//	    execveat ──▶ second stage ("apply-confined")
//	                                   checks its capabilities, loads its seccomp filter on every thread, tries
//	                                   forbidden operations, and only then reads the stream
//
// A kernel without Landlock unpacks without that fence, and the doctor says so. Everything else is
// there or nothing is unpacked.
//
// An error travels as {stage, class, message}: the class names one of the sentinel errors of
// package runtime.
package launcher
