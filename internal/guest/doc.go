// Package guest is the protocol between the daemon and the init of a sandbox: messages, bounds and
// their validation.
//
// Package guest/host is the daemon's side, guest/inside that of the sandbox (cmd/sandboxd-init).
// Neither imports the other.
//
// # Theory of operation
//
// Before its first request init confines itself, over a socket pair from the launcher that it then
// closes:
//
//	launcher                                      init
//	  ── the program of its seccomp filter ────▶    loads it on every thread, first thing; drops capabilities that
//	                                                no program may inherit; puts the thread that forks programs
//	                                                into its Landlock domain
//	  ◀────────────────────────── one byte ────    all of that is in force; the launcher reports the sandbox
//
// Silence means that it has ended, which the launcher reports with init's standard error.
//
// From then on init serves a listening SOCK_SEQPACKET socket whose path exists on the host only.
// Every request of the daemon is a connection of its own: connect, one request packet, one or more
// answer packets, close. The daemon cancels a request by closing its connection.
//
// A packet is a word, a space, a JSON object and, each after a NUL, strings that are bytes rather
// than text (paths, arguments, environments, link targets); descriptors come along by SCM_RIGHTS.
// Each word has one struct in protocol.go. Any request may be answered with
//
//	◀── error {stage, errno} path ──    the request was refused; the last packet
//
// Descriptors travel, bytes do not: init never reads the output of a process, and never copies a
// file (only a tree, as a tar stream into or out of a pipe).
//
// # Exec
//
//	daemon                                        init
//	  ── exec {args, user, non_root | uid, gid,
//	     groups; timeout, make_cwd, limits}
//	     cwd argv… env… + stdin stdout stderr ──▶   looks the program up, forks, executes
//	  ◀────────────── started {pid} ────────────   init has closed its copies of the three
//	  ── signal {signal, all | main} ──────────▶   to the main process's group, to every process of the exec that
//	                                               /proc shows, or to the main process alone; any number of times
//	  ── kill {} ──────────────────────────────▶   everything that the exec has started
//	  ◀── exited {code | signal, timeout,
//	             wall, cpu, maxrss} ─────────────   the last packet
//
// With tty no descriptors are sent; init makes a terminal of the sandbox's own devpts and sends its
// master with started. The host sets its size (TIOCSWINSZ on the master). Strings that do not fit
// into a packet are in a memfd, the last descriptor; the request says memfd.
//
// With whole init first waits 3 ms for the end of the process, and reports a process that has ended
// by then with one packet. All of its output is in the pipes by then.
//
//	── exec {…, whole} … ────────────────▶   looks the program up, forks, executes, waits a moment
//	◀── exited {pid, code | signal, …} ───   the last packet; or else, 3 ms later, started, and all as above
//
// When the main process ends by itself, init sends exited at once. Processes that it left behind go
// on, in background, until the sandbox ends. After the timeout or a kill, everything that the exec
// has started is killed first, and exited means that nothing is left. When the daemon closes the
// connection of a running exec, init kills in the same way and sends nothing. If something cannot
// be killed for 10 s, init ends, and the sandbox with it.
//
// With limits the forked process first executes init's own program (argv[0] "sandboxd-limits"),
// with the ids of the exec and no environment. That sets the limits and executes the program. Its
// pipe to init carries the errno of a failure; success closes it.
//
// An exec can survive the daemon. Its exit stays in the connection's queue until the connection is
// closed (the daemon reads it with MSG_PEEK). Its output goes from the pipe to a file of memory by
// splice(2), so that no byte is ever in the daemon alone. The daemon leaves the descriptors in the
// launcher's descriptor store, and the next one continues with them; init notices nothing.
//
//	process ── pipe ──────────────────────────── splice ──▶ memfd    the file's own offset is the number of bytes so far
//	process ── terminal ── splice ──▶ relay pipe ── splice ──▶ memfd
//
// Init is lost if started does not come in 30 s (or by the caller's deadline), or exited not within
// 10 s after the timeout or a kill. The daemon then ends the sandbox. While init gets no processor,
// the host waits for two minutes longer (host.Load).
//
// # Users
//
//	── user {non_root} user ─────────────────▶   looks it up in /etc/passwd and /etc/group of the sandbox
//	◀── account {uid, gid, groups} home ──────
//
// With user in place of the ids, exec looks the user up itself, and adds HOME to env if that has
// none.
//
// # Processes
//
//	── processes {} ─────────────────────────▶
//	◀────────────── listing {} ───────────────
//	◀── process {pid, ppid, uid, state, age,
//	             cpu, rss, name, main, cut}
//	    argv… ────────────────────────────────   each but init, 4096 at most; main is the pid of the main process
//	◀────────────── done {} ──────────────────   of its exec, while that runs
//
//	── holder {socket} ──────────────────────▶   reads the links of /proc/PID/fd, 16384 at most
//	◀── process {…} argv… ────────────────────   the first that has the socket; else ESRCH
//
// # Files
//
//	── open {} path ─────────────────────────▶   resolves the path in the sandbox
//	◀────────────── opened {} + file ─────────   a regular file, read only; anything else is refused unopened
//
//	── create {mode, uid, gid} path ─────────▶   makes parents, and a file beside the target
//	◀────────────── created {} + file ────────   write only, new
//	── commit {new} | abort {} ──────────────▶   renames it to the target, which must be free if new | removes it and
//	                                             the new parents; so does closing
//	◀────────────── done {} ──────────────────
//
//	── append {mode, uid, gid} path ─────────▶   as open; for a missing file the daemon requests create
//	◀────────────── opened {} + file ─────────   write only, at its end
//
//	── stat {follow} path ───────────────────▶   follows links, the last one if asked
//	◀── info {size, mode, mtime, uid, gid} link
//
//	── list {depth} path ────────────────────▶   reads the directory, parents before their entries
//	◀── entries {list} (path link)… ──────────   at most 128; the first may be empty; any number of packets
//	◀────────────── listed {more} ────────────   the last packet; more: too deep or too long a path was left out
//
//	── mkdir {mode, uid, gid, parents} path ─▶
//	── move {overwrite} path path ───────────▶   renames
//	── remove {recursive} path ──────────────▶   level by level, following neither links nor mounts
//	◀────────────── done {} ──────────────────   of each of the three
//
//	── watch {recursive} path ───────────────▶   watches, then scans for directories below
//	◀────────────── watching {} ──────────────   from now on changes are reported
//	◀── events {list} (path to)… ─────────────   at most 128; any number of packets, whenever something happens
//	◀────────────── done {} ──────────────────   the watched file is gone; the last packet
//
//	── tar-out {} path + pipe ───────────────▶   writes the tree into the pipe, and closes it
//	◀────────────── done {} ──────────────────
//
//	── tar-in {uid, gid} path + pipe ────────▶   extracts below path until the pipe's end
//	◀────────────── done {} ──────────────────
//
//	── ping {} ──────────────────────────────▶
//	◀────────────── pong {} ──────────────────
//
// The paths of entries and events are relative to the requested one; the host refuses those that
// could lead out of it. A list, a removal, a watch and a tar stream end when the daemon closes the
// connection. While the daemon does not read, init waits, with one packet and the directories on
// the way down in memory: 200 of them for a list and the first scan of a watch, 64 for a removal,
// which moves deeper ones up.
//
// A watch keeps a node for each of its directories. All watches together have 8192 at most, and
// there are at most 16. Directories beyond that, and events that the kernel had to drop, are
// reported as overflow; after a drop the whole tree is scanned again. A directory is watched before
// it is read, and the entries of a new one are reported as created: at least once, perhaps twice.
//
// Silence of init means that it is lost: after 30 s without an answer, 10 minutes in the first scan
// of a watch, and 10 minutes without progress of a tar stream. A removal is given up after 10
// minutes. A watch that has begun may be silent for ever.
//
// Where the sandbox has several ids, init has another real uid than the programs, drawn by lot. By
// that uid the kernel counts epoll watches, descriptors in flight and processes. If init's user has
// no epoll watch left all the same, init waits by poll(2). On the host that is guest.ErrNoWatch, an
// error of the one request.
//
// Init keeps one descriptor in reserve: when it has no other left, or 1024 connections, it answers
// every request with EMFILE. Lists, removals, watches and archives together use half of its
// descriptors. One that needs more is refused, or reports the missing part like a directory that
// cannot be read.
//
// The kernel may let init send no descriptor (ETOOMANYREFS: the user has too many in flight, see
// inside/send.go), not under another id either. Then init kills the processes of the request, and
// refuses it.
//
// # Trust
//
// Init is untrusted: an attacker may control it. Every answer must be the one packet that is due,
// of bounded size, strict JSON, values within their ranges, exactly the descriptors that are due,
// and those of the right kind (checked with fstat, fstatfs and F_GETFL). Any other answer is
// host.ErrLost. An [*Error] is a proper refusal.
//
// The daemon is trusted, but its packets are checked: none may crash init, which would end the
// sandbox.
package guest
