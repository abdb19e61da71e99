// Package guest is the protocol between the daemon and the init of a sandbox: messages, bounds and their validation.
//
// Package guest/host is the daemon's side, guest/inside that of the sandbox (cmd/sandboxd-init). Neither imports the other.
//
// # Theory of operation
//
// Before it serves anybody, init confines itself, on a socket pair that the launcher has given it, and then closes:
//
//	launcher                                      init
//	  ── the program of its seccomp filter ────▶    loads it on every thread, first thing; gives up what no program may inherit;
//	                                                puts the thread that forks programs into its Landlock domain
//	  ◀────────────────────────── one byte ────    all of that holds; the launcher answers that there is a sandbox
//
// Silence means that it has ended, which the launcher tells of with what init has said on its standard error.
//
// What stays is a listening SOCK_SEQPACKET socket whose path exists on the host only. Every request of the daemon is a connection of its own: connect, one request packet, one or more answer packets,
// close. A connection that is closed by the daemon ends what it asked for.
//
// A packet is a word, a space, a JSON object and, each after a NUL, strings that are bytes rather than text (paths,
// arguments, environments, link targets); descriptors come along by SCM_RIGHTS. Each word has one struct in protocol.go.
// Any request may be answered with
//
//	◀── error {stage, errno} path ──    the request was refused; the last packet
//
// Descriptors travel, bytes do not: init never reads what a process writes, and never copies a file (only a tree, as a tar
// stream into or out of a pipe).
//
// # Exec
//
//	daemon                                        init
//	  ── exec {args, uid, gid, groups, timeout,
//	     make_cwd, limits}
//	     cwd argv… env… + stdin stdout stderr ──▶   looks the program up, forks, executes
//	  ◀────────────── started {pid} ────────────   init has closed its copies of the three
//	  ── signal {signal, all} ─────────────────▶   to the main process's group, or to all that /proc shows of the
//	                                               exec; any number of times
//	  ── kill {} ──────────────────────────────▶   everything that the exec has started
//	  ◀── exited {code | signal, timeout,
//	             wall, cpu, maxrss} ─────────────   the last packet
//
// With tty no descriptors are sent; init makes a terminal of the sandbox's own devpts and sends its master with started.
// Its size is the host's to change (TIOCSWINSZ on the master). Strings that do not fit into a packet are in a memfd, the
// last descriptor; the request says memfd.
//
// With whole the daemon does not wait for the start: init waits 3 ms for the end instead, and tells of a process that has ended by
// then with one packet. Nobody waits for its output either, for it lies in the pipes.
//
//	── exec {…, whole} … ────────────────▶   looks the program up, forks, executes, waits a moment
//	◀── exited {pid, code | signal, …} ───   the last packet; or else, 3 ms later, started, and all as above
//
// When the main process ends by itself, exited is sent at once and what it left behind goes on, in background, until the
// sandbox ends. When the timeout ends, or the daemon says kill, everything that the exec has started is killed first, and
// exited says that nothing is left. When the daemon closes the connection of a running exec, the same happens without a
// last word. Init gives up on what does not die in 10 s, and stays silent.
//
// With limits the forked process first becomes init's own program once more (argv[0] "sandboxd-limits"), with the ids of the
// exec and no environment; that sets them and executes the program. A pipe that its success closes tells init the errno otherwise.
//
// An exec can survive the daemon. Its exit stays in the connection's queue until the connection is closed (the daemon looks
// with MSG_PEEK), and its output goes from the pipe to a file of memory by splice(2), so that at no moment bytes are in the
// daemon only. The daemon leaves the descriptors with the launcher, and the next one goes on with them; init notices nothing.
//
//	process ── pipe ──────────────────────────── splice ──▶ memfd    the file's own offset says how much there has been
//	process ── terminal ── splice ──▶ relay pipe ── splice ──▶ memfd
//
// Silence means: no started in 10 s (or the caller's deadline), no exited 2 s after the timeout or a kill: init is lost,
// and the daemon ends the sandbox.
//
// # Processes
//
//	── processes {} ─────────────────────────▶
//	◀────────────── listing {} ───────────────
//	◀── process {pid, ppid, uid, state, age,
//	             cpu, rss, name, main, cut}
//	    argv… ────────────────────────────────   each but init, 4096 at most; main is the pid of the main process of the
//	◀────────────── done {} ──────────────────   exec that it comes from, while that runs
//
// # Files
//
//	── open {} path ─────────────────────────▶   resolves the path in the sandbox
//	◀────────────── opened {} + file ─────────   a regular file, read only; anything else is refused unopened
//
//	── create {mode, uid, gid} path ─────────▶   makes parents, and a file beside the target
//	◀────────────── created {} + file ────────   write only, new
//	── commit {new} | abort {} ──────────────▶   renames it to the target, which must be free if new | removes it, and parents that
//	                                             it has made; so does closing
//	◀────────────── done {} ──────────────────
//
//	── append {mode, uid, gid} path ─────────▶   as open; where nothing is there the daemon has it made by create
//	◀────────────── opened {} + file ─────────   write only, at its end
//
//	── stat {follow} path ───────────────────▶   follows links, the last one if asked
//	◀── info {size, mode, mtime, uid, gid} link
//
//	── list {depth} path ────────────────────▶   reads the directory, parents before what is in them
//	◀── entries {list} (path link)… ──────────   at most 128; the first may be empty; any number of packets
//	◀────────────── listed {more} ────────────   the last packet; more: too deep or too long a path was left out
//
//	── mkdir {mode, uid, gid, parents} path ─▶
//	── move {overwrite} path path ───────────▶   renames
//	── remove {recursive} path ──────────────▶   level by level, following neither links nor mounts
//	◀────────────── done {} ──────────────────   of each of the three
//
//	── watch {recursive} path ───────────────▶   watches, then looks for directories below
//	◀────────────── watching {} ──────────────   from now on changes are told
//	◀── events {list} (path to)… ─────────────   at most 128; any number of packets, whenever something happens
//	◀────────────── done {} ──────────────────   what was watched is gone; the last packet
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
// The paths of entries and events are below the one that was asked for; the host refuses those that could lead out of it.
// A list, a removal, a watch and a tar stream end when the daemon closes the connection. Until it reads, init waits, with one
// packet and the directories on the way down in memory: 200 of them for a list and the first look of a watch, 64 for a
// removal, which moves up what is deeper. A watch keeps a node for each of its directories; all watches
// together have 8192 at most, and there are at most 16. What it cannot watch, and what the kernel had to drop, it tells as overflow; after a drop it looks at the
// whole tree again. A directory is watched before it is read, and what is found in a new one is told as created: at least
// once, perhaps twice.
//
// Silence means for files: no answer in 30 s, for the first look of a watch in 10 minutes, for a tar stream in 10 minutes since
// something last moved: init is lost. A removal is given up after 10 minutes. Of a watch that has begun silence means nothing.
// Without a descriptor left init answers every request with EMFILE, for which it keeps one, and so it does where it has 1024 connections.
// Lists, removals, watches and archives together have half of its descriptors; the one that wants more is refused, or told of what is
// missing as of a directory that cannot be read.
//
// Where the kernel lets init send no descriptor (ETOOMANYREFS: the user has too many under way, see inside/send.go), not under
// another id either, that request is refused, and what it has started is killed before.
//
// # Trust
//
// What init says is untrusted: an attacker may own it. Every answer must be the one packet that is due, of bounded size, strict
// JSON, values within their ranges, exactly the descriptors that are due, and those of the right kind (checked with
// fstat, fstatfs and F_GETFL). Everything else is [ErrLost]. An [*Error] is a proper refusal.
//
// What the daemon says is trusted, but checked: nothing it sends may crash init, which would end the sandbox.
package guest
