// Generated from docs/reference/openapi.json by `npm run generate`.

/**
 * AgentBudget bounds the resources of a run. A zero field means the default, or no ceiling if there
 * is none.
 */
export interface AgentBudget {
  turns?: number
  conversation_tokens?: number
  /** total of all model calls */
  tokens?: number
  cost_usd?: number
  seconds?: number
  cpu_seconds?: number
}

/**
 * AgentModel selects the model. The daemon uses the key but never stores it: no record, list, log
 * or process argument holds it.
 */
export interface AgentModel {
  /** with its provider as prefix, as in --llm_name */
  name?: string
  /** a secret before its host is refused */
  base_url?: string
  /** default: from the daemon's environment or settings */
  key?: string
  /**
   * absolute path of a trajectory.json to replay, on the daemon's host, below the same directories
   */
  replay?: string
  retries?: number
}

/** AgentRun is one run of the agent that the daemon hosts. */
export interface AgentRun {
  id: string
  /** on the daemon's host: record.jsonl, and at the end trajectory.json and files/ */
  dir: string
  state: AgentRunState
  exit_reason?: string
  exit_detail?: string
  turns: number
  tool_calls: number
  denied: number
  tokens: number
  cost_usd: number
  /** UnpricedCalls counts the model calls that Cost omits because their price is unknown. */
  unpriced_calls?: number
  seconds: number
  cpu_seconds: number
  model: string
  /** beginning of the task */
  query: string
  sandbox_id?: string
  /** (RFC 3339) */
  started_at: string
  /** time of the last change (RFC 3339) */
  updated_at: string
  /** reason why only ID, Dir and State are known */
  error?: string
}

/**
 * AgentRunEvent is one line of GET /v1/agent/runs/{run}/events: a line of the run's record. The
 * last line holds the run's state instead, once no process works on it.
 */
export interface AgentRunEvent {
  /** line number in the record, from 1 */
  n?: number
  /** described in docs/reference/agent.md */
  event?: unknown
  /** bytes of a line that is too long to send; the record has it */
  omitted?: number
  run?: AgentRun
}

/** AgentRunList is the answer to GET /v1/agent/runs, oldest first. */
export interface AgentRunList {
  runs: AgentRun[]
}

/** AgentRunState is the phase of a run. */
export type AgentRunState = "running" | "stopped" | "ended"

/** Artifact is a regular file that was written into the output directory of a run. */
export interface Artifact {
  /** absolute; invalid UTF-8 is replaced */
  path: string
  /** set only if Path is not exact (base64) */
  path_bytes?: string
  size: number
  /** by the name's extension */
  media_type: string
}

/**
 * Build holds the options of a build. It is the parameter "options" of POST /v1/builds, as JSON;
 * the body is the context, a tar stream. The answer is one BuildEvent per line.
 */
export interface Build {
  /** names of the image; default: localhost/build@sha256:... */
  tags?: string[]
  /**
   * Dockerfile is its path in the context; default: Dockerfile. A file called
   * ".sandboxd-dockerfile" is not part of the context: no COPY sees it.
   */
  dockerfile?: string
  /** name or number of a stage; default: the last */
  target?: string
  /** for ARG; SOURCE_DATE_EPOCH sets all times */
  args?: Record<string, string>
  /** of the image */
  labels?: Record<string, string>
  no_cache?: boolean
  /** a platform that this host runs */
  platform?: string
  /** of the programs of RUN */
  network?: Network
  /** of each of these programs */
  limits?: Limits
  /** seconds for the whole build; default: an hour */
  timeout?: number
  run_timeout?: number
}

/** BuildEvent is one line of a build's progress. The last line has Image or Error. */
export interface BuildEvent {
  /** number from 1; FROM counts */
  step?: number
  /** steps of all stages that are needed */
  steps?: number
  /** name, or number from 0 */
  stage?: string
  /** line of the Dockerfile */
  line?: number
  /** instruction */
  text?: string
  status?: BuildStatus
  /** digest of the step's layer, with "done" and "cached" */
  layer?: string
  wall_ms?: number
  /** "stdout" or "stderr" of a RUN program */
  stream?: string
  /** output that is valid UTF-8 */
  output?: string
  /** output that is not (base64) */
  data?: string
  /** pull of an image that FROM or --from names */
  pull?: PullEvent
  image?: Image
  error?: Problem
}

/** BuildStatus is the progress of a step. */
export type BuildStatus = "started" | "cached" | "done"

/** CPUStats counts processor time. */
export interface CPUStats {
  usage_ms?: number
  user_ms?: number
  system_ms?: number
  /** periods in which limits.cpus throttled it */
  throttled?: number
  /** total time throttled */
  throttled_ms?: number
}

/**
 * CancelAgentRun is the optional body of POST /v1/agent/runs/{run}/cancel. The run ends as after an
 * interrupt: its programs are ended and its output is collected. The answer does not wait for that.
 */
export interface CancelAgentRun {
  /** keep the sandbox, stopped, for a resume */
  keep?: boolean
}

/** Change is one difference between a sandbox's file system and its image. */
export interface Change {
  /** absolute; invalid UTF-8 is replaced */
  path: string
  kind: ChangeKind
  /** file, directory, symlink or fifo; of the current file, or of the deleted one */
  type: string
  /** bytes of a file's content */
  size?: number
}

/** ChangeKind is the way in which a file of a sandbox differs from its image's. */
export type ChangeKind = "added" | "changed" | "deleted"

/** Check is one line of `sandboxd doctor`. */
export interface Check {
  /** "user namespaces" */
  name: string
  ok: boolean
  /** observation */
  found: string
  /** consequence if not OK */
  means: string
  /** exact action; empty if OK */
  remedy: string
  /** no sandbox starts while it is not OK */
  fatal?: boolean
}

/** CheckList is the answer to GET /v1/system/checks. */
export interface CheckList {
  checks: Check[]
}

/** CheckRegistry is the body of POST /v1/registries/check. */
export interface CheckRegistry {
  /** address, such as "docker.io" or "registry.example:5000" */
  registry: string
  /** as in PullImage */
  insecure?: boolean
  /** as in PullImage */
  auth?: RegistryAuth
}

/** Code is the machine-readable class of an error, from a closed list. */
export type Code = "invalid_argument" | "too_large" | "forbidden" | "not_found" | "already_exists" | "conflict" | "gone" | "program_not_found" | "program_not_allowed" | "unenforceable" | "registry_error" | "image_invalid" | "build_failed" | "language_not_found" | "install_failed" | "code_refused" | "unavailable" | "internal"

/**
 * CodeEvent is one line of a streaming answer. The last line has type "end", or a Problem if the
 * outcome is unknown.
 */
export interface CodeEvent {
  type?: CodeEventType
  /** (RFC 3339) */
  time?: string
  /** output that is valid UTF-8 as it stands */
  text?: string
  /** other output (base64) */
  data?: string
  /** ExecutionCount numbers the runs of a context from 1 on; in "started" and "end". */
  execution_count?: number
  result?: CodeValue
  failure?: CodeFailure
  /** in "end"; of a context, code 1 after a failure */
  exit?: Exit
  /** in "end" */
  usage?: Usage
  /** in "end" */
  artifacts?: Artifact[]
  /** ArtifactsMissed comes with "end": see CodeResult. */
  artifacts_missed?: boolean
  /** Findings and Amended are those of CodeResult; in "started". */
  findings?: CodeFinding[]
  amended?: boolean
  problem?: Problem
}

/** CodeEventType says which fields of a CodeEvent are set. */
export type CodeEventType = "started" | "stdout" | "stderr" | "result" | "error" | "end"

/** CodeFailure is an exception that ended a run, or the message of a compiler. */
export interface CodeFailure {
  /** the exception's type; "CompileError" of a compiler */
  name: string
  /** its message */
  value: string
  traceback?: string
}

/** CodeFinding is a place in code that a rule of a code policy is about. */
export interface CodeFinding {
  kind: FindingKind
  /** the pattern, or the restricted module */
  name: string
  /** beginning of the text in the code, or the module that it names */
  found: string
  /** from 1 on; absent of a library */
  line?: number
  severity: CodeSeverity
  /** of the rule */
  reason?: string
  refused?: boolean
}

/** CodeLogs is the output of a run, without results. */
export interface CodeLogs {
  /** invalid UTF-8 is replaced */
  stdout: string
  stderr: string
}

/**
 * CodeRequest is the body of POST /v1/sandboxes/{id}/code: source text that the daemon runs with
 * the language's interpreter or compiler of the sandbox's image. The Accept header selects the
 * answer, as for an exec: a CodeResult at its end, or a CodeEvent per line as it happens.
 */
export interface CodeRequest {
  /** at most 1 MiB */
  code: string
  /**
   * Language is a name of GET /v1/languages or an alias of it; default "python". Not with Context.
   */
  language?: string
  /**
   * Context is the id of a context of the sandbox, whose variables the code sees and changes.
   * Without one, code runs in a process of its own and leaves files only.
   */
  context?: string
  /** of the program; not with Context */
  args?: string[]
  /** whole input of the program; base64 in JSON; not with Context (base64) */
  stdin?: string
  /** added to the sandbox's; in a context, for this run */
  env?: string[]
  /** absolute; default: the sandbox's; not with Context */
  cwd?: string
  /** as in CreateSandbox; not with Context */
  user?: string
  /**
   * Libraries are installed before the run by the language's package manager, if they are missing.
   * Names and versions follow the rules of its ecosystem. In a context its user installs them, in
   * its directory.
   */
  libraries?: string[]
  /**
   * LibraryDir is the absolute path of a directory of the sandbox with packages: wheels, tarballs,
   * gems, .deb files, or a Go module proxy. Libraries are installed of these alone.
   */
  library_dir?: string
  /**
   * OutputDir is the absolute path of a directory of the sandbox. The files that are written there
   * during the run are its artifacts. The code may make it.
   */
  output_dir?: string
  /**
   * Timeout is the time in seconds after which every process of the run is killed, from its start;
   * installation and compilation count. The output until then is kept. In a context the run is
   * interrupted, and the context is restarted if that does not end it. 0 means only the sandbox's
   * deadline.
   */
  timeout?: number
  /**
   * OutputLimit is the maximum number of bytes kept of each stream in a buffered answer, as in
   * ExecRequest.
   */
  output_limit?: number
  /**
   * Policy is a code policy of version 1, in YAML or JSON, at most 64 KiB. The code must pass it as
   * well as the daemon's own, or is refused with CodeRefused.
   */
  policy?: string
  /** Check judges the code by the policies and does not run it. */
  check?: boolean
}

/**
 * CodeResult is the buffered answer to a run. An exception or a non-zero exit code is a result, not
 * an error of the request.
 */
export interface CodeResult {
  results: CodeValue[]
  logs: CodeLogs
  error?: CodeFailure
  execution_count?: number
  exit: Exit
  usage: Usage
  /** of OutputDir, by path; at most 1000 */
  artifacts?: Artifact[]
  /**
   * ArtifactsMissed means that there may be more: over 1000, or the directory cannot be read as a
   * whole.
   */
  artifacts_missed?: boolean
  /** output beyond OutputLimit was dropped */
  truncated?: boolean
  /** Findings are those of the code policies that did not refuse the code, by line. */
  findings?: CodeFinding[]
  /**
   * Amended means that the operator's hook changed the code before it ran. Lines are then those of
   * the changed code.
   */
  amended?: boolean
}

/** CodeSeverity grades a finding of a code policy. */
export type CodeSeverity = "low" | "medium" | "high" | "critical"

/**
 * CodeValue is one value that code displayed, in the forms that its type has. Binary forms are
 * base64 in JSON.
 */
export interface CodeValue {
  text?: string
  html?: string
  markdown?: string
  svg?: string
  /** (base64) */
  png?: string
  /** (base64) */
  jpeg?: string
  /** (base64) */
  pdf?: string
  latex?: string
  json?: unknown
  javascript?: string
  /** a table: columns and their values */
  data?: unknown
  /** a chart as data: type, title, axes, elements */
  chart?: unknown
  /** forms of other media types, by type */
  extra?: unknown
  /** Main marks the value of the code's last expression; others were displayed on the way. */
  is_main_result?: boolean
}

/** CommitSandbox is the body of POST /v1/sandboxes/{id}/commit. */
export interface CommitSandbox {
  /** of the new image; an existing image loses the name */
  reference: string
  /**
   * Config overrides how the new image is run; empty fields stay. Env and Labels are merged by
   * name, and Volumes and Ports are added. An Entrypoint without a Cmd removes the image's Cmd, as
   * in a Dockerfile.
   */
  config?: ImageConfig
  /** for the image's history */
  comment?: string
  /** of the new image; default the image's */
  author?: string
}

/** ConnectNetwork is the body of POST /v1/networks/{network}/connect. */
export interface ConnectNetwork {
  /**
   * Sandbox is the ID or name of a sandbox that does not run, or runs with a network of its own
   * that is not none alone.
   */
  sandbox: string
  /** Aliases replace those that the sandbox has in the network. */
  aliases?: string[]
}

/** Context is a process of an interpreter that keeps variables between runs of code. */
export interface Context {
  id: string
  /** its id */
  sandbox: string
  language: string
  cwd: string
  state: ContextState
  /** (RFC 3339) */
  created_at: string
  /** (RFC 3339) */
  used_at: string
  execution_count: number
  /** ID of the exec that its process is */
  exec?: string
}

/** ContextList is the answer to GET /v1/sandboxes/{id}/contexts, oldest first. */
export interface ContextList {
  contexts: Context[]
}

/** ContextState is the phase of a context's life. */
export type ContextState = "idle" | "busy" | "dead"

/** CreateContext is the body of POST /v1/sandboxes/{id}/contexts. */
export interface CreateContext {
  /** default "python" */
  language?: string
  /** absolute; default: the sandbox's */
  cwd?: string
  /** as in CreateSandbox */
  user?: string
  /** added to the sandbox's */
  env?: string[]
  /**
   * Preload are modules that the interpreter imports before the context is ready; python only. The
   * sandbox then keeps one more interpreter ready, for the next context with an equal request.
   */
  preload?: string[]
  /**
   * Memory is the size in bytes of the context's address space; 0 means only the sandbox's limit.
   */
  memory?: number
  /**
   * IdleTimeout is the time in seconds without a run after which the context is deleted; 0 means
   * the sandbox's end.
   */
  idle_timeout?: number
}

/** CreateNetwork is the body of POST /v1/networks. */
export interface CreateNetwork {
  /** see NamedNetwork */
  name: string
  /** as a sandbox's */
  labels?: Record<string, string>
  /** Internal makes it no way out; see NamedNetwork. No sandbox may be in the network yet. */
  internal?: boolean
}

/** CreateSandbox is the body of POST /v1/sandboxes. */
export interface CreateSandbox {
  /** reference or "host"; default "host" */
  image?: string
  /**
   * Snapshot is the ID or name of the snapshot to start from, instead of an Image. Environment,
   * directory, user, profile and network default to those of the snapshot's sandbox.
   */
  snapshot?: string
  /** unique per tenant; letters, digits, "_.-", at most 63; default: generated */
  name?: string
  /** "KEY=value", added to the image's own for every exec; "KEY" takes it away */
  env?: string[]
  /** absolute, made if it is missing; default: the image's working directory, else "/" */
  cwd?: string
  /** "name", "uid" or "uid:gid"; default: the image's user, else root of the sandbox */
  user?: string
  /** at most 64 keys */
  labels?: Record<string, string>
  /** name from oci-profiles; default "default" */
  profile?: string
  limits?: Limits
  network?: Network
  /** Ports are published while the sandbox runs. They need a network. */
  ports?: PortMapping[]
  /**
   * Command is the argv of the sandbox's main process, which gets the sandbox's environment,
   * directory and user. It starts with the sandbox, and the sandbox ends with it. Its output is
   * kept in the log. Default: none; the sandbox then idles.
   */
  command?: string[]
  /**
   * ImageCommand runs the image's ENTRYPOINT and CMD as main process; Command then replaces CMD.
   * With Snapshot it needs an Entrypoint: snapshots keep none.
   */
  image_command?: boolean
  /**
   * Entrypoint replaces the image's ENTRYPOINT, and drops its CMD. A single empty string clears
   * both.
   */
  entrypoint?: string[]
  /** gives the main process a terminal, as in ExecRequest */
  tty?: boolean
  /** as in ExecRequest */
  stdin_open?: boolean
  /**
   * Stopped makes the sandbox without running it: it is "stopped" for the reason "created" until it
   * is started.
   */
  stopped?: boolean
  /**
   * Timeout is the time in seconds after which the sandbox is stopped, busy or not. 0 means the
   * daemon's default, an hour. -1, Never, means no end, of sandboxes of the daemon's own user only;
   * the idle timeout remains.
   */
  timeout?: number
  /**
   * IdleTimeout is the time in seconds without an exec or file request after which the sandbox is
   * stopped; 0 means the daemon's default, ten minutes.
   */
  idle_timeout?: number
  /**
   * Hostname has at most 64 letters, digits, inner hyphens and dots. Default: the sandbox's name.
   */
  hostname?: string
  /**
   * ReadOnly makes the root read-only. Only /dev, /proc, Tmpfs and the profile's mounts are
   * writable, so a program that needs /tmp or /run needs a Tmpfs there.
   */
  read_only?: boolean
  /**
   * Tmpfs are at most 16 writable file systems in memory, none within another. They hide what the
   * image has there. The default size is 64 MiB, the default mode 1777 (octal).
   */
  tmpfs?: Scratch[]
  /**
   * Mounts are at most 16 directories and files of the host and volumes, none within another or
   * within a Tmpfs. The image's VOLUMEs are added to them, each as a volume without a name, unless
   * one of these is at the same place. Tenants of a daemon that serves several have volumes only.
   */
  mounts?: Mount[]
  /** ShmSize is the size of /dev/shm in bytes; default 64 MiB. */
  shm_size?: number
  /**
   * Rlimits are resource limits of every process, named as in ExecRequest, whose own replace them.
   * A nofile also raises limits.nofile unless that is given.
   */
  rlimits?: Record<string, Rlimit>
  /**
   * Hosts are at most 256 lines more of /etc/hosts. A sandbox without a network then has a file of
   * its own over the image's, too.
   */
  hosts?: HostAddress[]
  /**
   * CapDrop and CapAdd change the capabilities of the profile: names with or without CAP_, or ALL.
   * CapAdd names only capabilities that the profile has, and keeps them from a CapDrop of ALL.
   */
  cap_drop?: string[]
  cap_add?: string[]
  /**
   * StopSignal is sent to every process when the sandbox is stopped. Default: the image's
   * STOPSIGNAL, else SIGTERM.
   */
  stop_signal?: string
  /**
   * Restart is "no" (the default), "on-failure", "on-failure:N" with at most N restarts, "always"
   * or "unless-stopped". It starts a sandbox again whose main process has ended: first after 0.1 s,
   * then after twice the time before, up to a minute; a process that ran for 10 s begins anew. A
   * sandbox is not started again after its deadline, which a restart leaves as it is, nor after an
   * idle timeout or a stop; "always" starts a stopped one when the daemon starts. It needs a main
   * process.
   */
  restart?: string
  /**
   * HealthCheck is the check of the sandbox's service. Default: the image's HEALTHCHECK for a
   * sandbox with a main process, else none. An empty object asks for the image's in any case.
   */
  health_check?: HealthCheck
  /**
   * AutoRemove removes the sandbox with its files and log when it has ended, for whatever reason.
   * The daemon does it, or the next one. A request that waits for the end gets the exit all the
   * same. It cannot be rolled back, and has no restart policy. A fork is not removed so.
   */
  auto_remove?: boolean
  /**
   * Annotations are notes of the client that made the sandbox, for itself: at most 64 keys and 256
   * KiB in all. Nothing here reads them.
   */
  annotations?: Record<string, string>
  /**
   * Workspace is a directory of the host to work on. Only the daemon's own user can name one. A
   * fork has none.
   */
  workspace?: Workspace
}

/**
 * CreateVolume is the body of POST /v1/volumes. If there is a volume of the name with these values,
 * it is the answer.
 */
export interface CreateVolume {
  /**
   * Name has up to 128 letters, digits, '_', '.' and '-', and begins with a letter or digit.
   * Default: one is made up, and the volume is anonymous.
   */
  name?: string
  /** as a sandbox's */
  labels?: Record<string, string>
  /** see Volume; default: none, or the daemon's */
  size?: number
  /** default: one for each 8 KiB of Size, and at least 10,000 */
  inodes?: number
}

/** DisconnectNetwork is the body of POST /v1/networks/{network}/disconnect. */
export interface DisconnectNetwork {
  /** ID or name */
  sandbox: string
}

/** DiskShare is the part of one kind of object. */
export interface DiskShare {
  count: number
  /** number of those in use: images and snapshots of sandboxes, sandboxes that have not ended */
  active: number
  bytes: number
  /** Reclaimable is the number of bytes that go when all that is not in use is removed. */
  reclaimable: number
}

/**
 * DiskStats is the space of the sandbox's files when last counted: at most some seconds ago, and
 * less the nearer a limit is.
 */
export interface DiskStats {
  /** of allocated blocks */
  bytes: number
  inodes: number
  /** Exceeded is the reason why the sandbox was ended, if it was ended for its disk usage. */
  exceeded?: string
}

/**
 * DiskUsage is the answer to GET /v1/system/df: the bytes on disk of the caller's objects. A layer
 * or blob that several objects share is counted once: for images before the build cache, and for
 * snapshots.
 */
export interface DiskUsage {
  images: DiskShare
  /** layers of build steps that no image needs, and caches of RUN */
  build_cache: DiskShare
  /** their layers */
  snapshots: DiskShare
  /** files that programs have written or changed */
  sandboxes: DiskShare
  /** output of main processes */
  logs: DiskShare
  /** their files; those that no sandbox has are reclaimable */
  volumes: DiskShare
  /** Files has a line for each sandbox, oldest first. */
  files: SandboxFiles[]
  /** VolumeFiles has a line for each volume, by name. */
  volume_files: VolumeFiles[]
}

/**
 * Enforced lists the restrictions that really hold a sandbox on this host. An empty string never
 * means that one holds.
 */
export interface Enforced {
  /** namespaces of the sandbox's own */
  namespaces: string[]
  /** IDs is IDsOwn, IDsShared or IDsSingle. */
  ids: string
  /** name of the profile, which applies as a whole */
  profile: string
  /** name of the profile whose filter is loaded */
  seccomp: string
  /** always true */
  no_new_privs: boolean
  /** size of the bounding set, inside the sandbox's own user namespace */
  capabilities: number
  /**
   * NonRoot means that no program runs as root of the sandbox. ReadOnlyRoot means that only the
   * profile's mounts and /dev are writable.
   */
  non_root: boolean
  read_only_root: boolean
  /**
   * Landlock is the version that confines programs; 0 means none. They change no mount, make no
   * block device, and write only where the profile allows it. From version 6 on they neither signal
   * processes nor reach abstract sockets outside.
   */
  landlock: number
  /**
   * Cores is "none" if the crash of a program starts nothing on the host, or "host" if it starts
   * the host's program for cores, or is handed to its service, as root of the host.
   */
  cores: string
  /** "cgroup" or "none" */
  memory: string
  /** "cgroup" or "none": the ceiling on time */
  cpu: string
  /** "cgroup" or "none"; ceiling on time */
  cpuset: string
  /** "cgroup" or "rlimit" */
  pids: string
  /** "cgroup", "direct" (not what goes through the page cache) or "none" */
  io: string
  /** EnforcedLoopback or EnforcedGateway */
  network: string
  /** Mounts is MountsMapped or MountsUser; empty without mounts of the host's files. */
  mounts?: string
  /**
   * Disk is "accounting" if a limit on disk or inodes holds the sandbox, else "none". The launcher
   * counts, and ends the sandbox after it has exceeded the limit.
   */
  disk: string
  /**
   * Volumes is "accounting" if a limit holds one of the sandbox's volumes: the launcher counts, and
   * ends the sandboxes that can write to the volume after it has exceeded the limit. It is "none"
   * if no volume of the sandbox has a limit; empty without volumes.
   */
  volumes?: string
  /** Workspace is WorkspaceMapped or WorkspaceShared; empty without a workspace. */
  workspace?: string
  /**
   * Uncounted names the memory of the kernel that programs can take and that neither a limit nor a
   * cgroup counts: UncountedLocks and UncountedTimestamps. It ends with them.
   */
  uncounted?: string[]
  /** Missing names the defaults that this host cannot provide, each with its remedy. */
  missing?: string[]
}

/** Event is one change of an object: a line of the answer to GET /v1/events. */
export interface Event {
  /**
   * ID increases from event to event, across restarts of the daemon too. IDs are not consecutive.
   */
  id?: number
  /** (RFC 3339) */
  time?: string
  type?: EventType
  action?: EventAction
  /**
   * Object is the ID of a sandbox, exec or snapshot, the reference or digest of an image, the name
   * of a secret, volume or network, the digest of code, or where a port is published.
   */
  object?: string
  /** of a sandbox or snapshot */
  name?: string
  /** ID of the sandbox of an exec, port, snapshot, code, committed image or connection */
  sandbox?: string
  /** reference of a sandbox's image */
  image?: string
  /** ID of the one that a sandbox was created from or rolled back to */
  snapshot?: string
  /** of a sandbox, after the change; of the one that is connected */
  state?: SandboxState
  /** of a sandbox */
  health?: HealthStatus
  /** of a start or stop: the sandbox runs without its main process */
  idle?: boolean
  /** of a stop, failure or judgement */
  reason?: string
  /** exit code of an exec, or of a stopped sandbox's main process; absent if unknown */
  code?: number
  /** argv0 of an exec; language of code */
  program?: string
  /** the exec is a sandbox's main process */
  main?: boolean
  /** name before a renaming; source of a tag */
  from?: string
  /** IDs */
  forks?: string[]
  port?: PortMapping
  /** named ones of a sandbox that runs now, or has stopped */
  networks?: string[]
  /** of a sandbox, snapshot, volume or network */
  labels?: Record<string, string>
  /**
   * Lost is the number of events before this one that are not kept, or that a slow client missed; 1
   * if the number is unknown. A line with Lost has nothing else.
   */
  lost?: number
  /** of a last line: the daemon stops */
  error?: Problem
}

/** EventAction names a change of an object. */
export type EventAction = "created" | "started" | "paused" | "resumed" | "updated" | "renamed" | "forked" | "rolled_back" | "health_status" | "stopped" | "ended" | "deleted" | "published" | "pulled" | "pushed" | "imported" | "tagged" | "committed" | "removed" | "built" | "failed" | "set" | "refused" | "warned" | "amended" | "connected" | "disconnected"

/** EventType is the kind of object that an event is about. */
export type EventType = "sandbox" | "exec" | "port" | "image" | "build" | "snapshot" | "secret" | "volume" | "network" | "code"

/**
 * Exec is one exec of a sandbox. Execs with a client are listed while they run. Detached ones are
 * listed for an hour after their end, the latest 32 of a sandbox, until they or the sandbox are
 * deleted.
 */
export interface Exec {
  id: string
  /** its id */
  sandbox: string
  /** its first 4 KiB */
  argv: string[]
  user?: string
  cwd: string
  tty?: boolean
  detached?: boolean
  /** as it was asked for */
  stdin_open?: boolean
  /** current or former main process; "main" also names the latest */
  main?: boolean
  /** inside the sandbox */
  pid: number
  state: ExecState
  /** (RFC 3339) */
  started_at: string
  /** (RFC 3339) */
  ended_at?: string
  exit?: Exit
  usage?: Usage
  /** of a lost exec */
  error?: Problem
  /** as in ExecRequest */
  annotations?: Record<string, string>
  /** written so far; 0 if a client reads the program's pipes itself */
  stdout_bytes: number
  stderr_bytes: number
  /** of a detached exec: bytes at the beginning of its output that are no longer kept */
  dropped?: number
}

/**
 * ExecControl is a text frame from the client on the WebSocket of an interactive exec. It follows
 * the first frame, which is the ExecRequest; exactly one field is set. Bytes travel in binary
 * frames whose first byte is a Channel.
 */
export interface ExecControl {
  resize?: TerminalSize
  /** "SIGINT", ...: for the program's process group */
  signal?: string
  stdin_close?: boolean
  /**
   * Detach makes a program on a terminal go on without this client. It becomes a detached exec
   * (DetachExec), or the main process of a sandbox that has none (MainExec). The tie of such a
   * sandbox to a client ends. Output before this frame is not kept.
   */
  detach?: string
}

/**
 * ExecEvent is one line of a streaming answer. The last line has Exit, or Error if the exec was
 * lost.
 */
export interface ExecEvent {
  /** "stdout" or "stderr" for output */
  stream?: string
  /** output that is valid UTF-8 as it stands */
  text?: string
  /** other output; a character that is written in two pieces arrives whole (base64) */
  data?: string
  /** first line: pid inside the sandbox */
  pid?: number
  /** first line: ID of the exec */
  exec?: string
  exit?: Exit
  /** with exit */
  usage?: Usage
  error?: Problem
  /**
   * Detached is set in the last event of a program that goes on without this client: see
   * ExecControl.
   */
  detached?: boolean
  /**
   * Offset and Dropped are set after an attach. Offset is the position of the event's output in the
   * whole output, all streams together. Dropped is the number of requested bytes before it that are
   * no longer kept. To continue after an event, attach at Offset plus the length of its output.
   */
  offset?: number
  dropped?: number
}

/** ExecList is the answer to GET /v1/sandboxes/{id}/execs, oldest first. */
export interface ExecList {
  execs: Exec[]
}

/** ExecRequest is the body of POST /v1/sandboxes/{id}/exec. */
export interface ExecRequest {
  /** program and arguments, without a shell; a name without "/" is looked up in PATH of env */
  argv: string[]
  /** added to the sandbox's; the last value of a name wins, and "KEY" takes it away */
  env?: string[]
  /** absolute; default: the sandbox's. It must exist unless cwd_create is set */
  cwd?: string
  /** as in CreateSandbox */
  user?: string
  /** whole input of the program; base64 in JSON (base64) */
  stdin?: string
  /** stdin, stdout and stderr are one terminal; output arrives as stdout */
  tty?: boolean
  /** of the terminal, default 24 */
  rows?: number
  /** of the terminal, default 80 */
  cols?: number
  /**
   * Timeout is the time in seconds after which every process of this exec is killed; 0 means only
   * the sandbox's deadline.
   */
  timeout?: number
  /**
   * OutputLimit is the maximum number of bytes kept of each stream in a buffered answer; default 1
   * MiB, at most 16 MiB. Excess output is dropped and sets truncated; the program goes on.
   * Streaming answers have no limit. For a detached exec it bounds the latest output of all streams
   * together.
   */
  output_limit?: number
  /** creates missing directories of cwd, mode 0755, owned by the user */
  cwd_create?: boolean
  /**
   * Rlimits holds resource limits of each process of the exec, soft and hard alike, in the units of
   * setrlimit(2). Names are as, core, cpu, data, fsize, memlock, nofile, nproc and stack. Values
   * must not exceed the sandbox's.
   */
  rlimits?: Record<string, number>
  /**
   * Detach answers 201 with an Exec as soon as the program has started. The program then runs
   * without a client, also while the daemon is down, and keeps the sandbox from idling.
   */
  detach?: boolean
  /**
   * StdinOpen keeps a detached program's stdin open after Stdin, for clients that attach or use the
   * stdin route. With a terminal it is always open. Of a program with pipes it asks for the stdin's
   * end; Stdin is then empty.
   */
  stdin_open?: boolean
  /**
   * Annotations are notes of the client for itself, shown with the exec: at most 64 keys and 4 KiB.
   */
  annotations?: Record<string, string>
}

/** ExecResult is the buffered answer to an exec. A non-zero exit code is a result, not an error. */
export interface ExecResult {
  exit: Exit
  usage: Usage
  /** invalid UTF-8 is replaced; stdout_bytes then has the exact bytes */
  stdout: string
  stderr: string
  /** StdoutBytes and StderrBytes are set only if the text form is not exact. (base64) */
  stdout_bytes?: string
  /** (base64) */
  stderr_bytes?: string
  truncated?: boolean
}

/** ExecSignal is the body of POST /v1/sandboxes/{id}/execs/{exec}/signal. */
export interface ExecSignal {
  /** "SIGINT", ... */
  signal: string
  /**
   * All signals every process of the exec that one scan finds, not only the program's process
   * group.
   */
  all?: boolean
  /** Main signals the program alone, without the rest of its process group. */
  main?: boolean
}

/** ExecState is the phase of an exec's life. */
export type ExecState = "prepared" | "running" | "exited" | "lost"

/** Exit describes how a process ended. Either its code or its signal is meaningful. */
export interface Exit {
  /** exit code; 128+n after signal n */
  code: number
  /** "SIGKILL", ... */
  signal?: string
  /** the out-of-memory killer acted in the sandbox's cgroup during the exec */
  oom?: boolean
  /** killed at its timeout */
  timeout?: boolean
}

/**
 * FileChange is one line of the answer to GET /v1/sandboxes/{id}/watch. The answer ends when the
 * watched path itself is deleted, with Error, or with its client. A change may be reported twice,
 * and quick successive changes as one. A file that appears in a new directory is reported at least
 * once.
 */
export interface FileChange {
  kind?: FileChangeKind
  /** absolute, below the watched path; absent for a move */
  path?: string
  /** (base64) */
  path_bytes?: string
  /** of a move */
  from?: string
  /** (base64) */
  from_bytes?: string
  to?: string
  /** (base64) */
  to_bytes?: string
  /** directory, or absent */
  type?: FileType
  error?: Problem
}

/** FileChangeKind is the kind of a change to a file. */
export type FileChangeKind = "ready" | "created" | "modified" | "attributes" | "deleted" | "moved" | "overflow"

/**
 * FileEntry describes one file of a sandbox: the answer to GET /v1/sandboxes/{id}/stat, and an
 * element of lists. The sandbox controls all of it, names above all: sanitise it before printing.
 */
export interface FileEntry {
  /** absolute; invalid UTF-8 is replaced */
  path: string
  /**
   * PathBytes is set only if Path is not exact. A query takes such a path percent-encoded, a body
   * in its field of bytes. (base64)
   */
  path_bytes?: string
  type: FileType
  size: number
  /** octal, four digits: "0644"; the first holds setuid, setgid and sticky */
  mode: string
  /** (RFC 3339) */
  mtime: string
  /** inside the sandbox */
  uid: number
  gid: number
  /** from the sandbox's /etc/passwd, if listed there */
  user?: string
  group?: string
  /** of a symlink, unresolved */
  target?: string
  /** (base64) */
  target_bytes?: string
  /** Error is the reason why a list lacks the content of this directory. */
  error?: string
}

/**
 * FileList is the buffered answer to GET /v1/sandboxes/{id}/list, sorted by path. More reports
 * missing entries: the answer was full, and its selection is then arbitrary, or a path was too deep
 * or too long.
 */
export interface FileList {
  entries: FileEntry[]
  more?: boolean
}

/** FileType is the type of a file. */
export type FileType = "file" | "directory" | "symlink" | "fifo" | "socket" | "block" | "char"

/** FindingKind is the kind of rule that a finding is of. */
export type FindingKind = "pattern" | "module"

/** Flow is one entry of the record of a sandbox's network: a line of JSON each. */
export interface Flow {
  /** of its begin (RFC 3339) */
  time: string
  kind: FlowKind
  /**
   * Protocol is tcp, tls, http, websocket or dns: the innermost that the gateway has read. It is
   * http for requests within TLS that it has read, and tls where it has not.
   */
  protocol: string
  /**
   * Name is the host name that decided; empty if a rule for the address did. In a refusal it is the
   * name that the program sent, which may be malformed. Of a peer it is the name of that sandbox.
   */
  name?: string
  /** of the destination, or of the peer; none of a query */
  address?: string
  port?: number
  /**
   * Method and Path are those of a request, without its query; a malformed path is left out. Method
   * of a query is its type, such as AAAA.
   */
  method?: string
  path?: string
  /** of the response; none came if it is absent */
  status?: number
  /** Allow is false if the flow was refused, at its begin or later. */
  allow: boolean
  /** that decided */
  rule?: string
  /** name of the one that was put into a request, or whose placeholder was refused */
  secret?: string
  /** of a refusal, or of an end that was not orderly */
  reason?: string
  /** bytes from the sandbox */
  out?: number
  /** bytes to the sandbox */
  in?: number
  duration_ms: number
  /** Process is the program's process, where it was found out. Of a peer there is none. */
  process?: FlowProcess
  /**
   * Lost is the number of entries before this one that were dropped because too many came at once.
   */
  lost?: number
  /** of a last line: the daemon stops */
  error?: Problem
}

/** FlowKind is the kind of event that a flow records. */
export type FlowKind = "connection" | "request" | "restart" | "query" | "peer"

/**
 * FlowProcess is the process that had the socket of a flow when it began, or was refused. The
 * sandbox is the source: a hostile program can have another one appear here. It is looked for at
 * most some times a second, and after a short connection it may be gone.
 */
export interface FlowProcess {
  /** in its sandbox */
  pid: number
  /** the kernel's name for it */
  name: string
  /** Exec is the id of the exec that has started it; empty if the exec had ended. */
  exec?: string
  /**
   * Sandbox is the id of the sandbox that it is in, where that shares the network of another one.
   */
  sandbox?: string
}

/**
 * ForkSandbox is the body of POST /v1/sandboxes/{id}/fork. It creates sandboxes with a sandbox's
 * current files, image, limits, profile, environment, user, directory, labels and idle timeout.
 * Processes are not copied.
 */
export interface ForkSandbox {
  /** number of new sandboxes, at most 100; default 1 */
  count?: number
  /** Names are the names of the new sandboxes, as many as Count; generated by default. */
  names?: string[]
  /** added to the sandbox's */
  labels?: Record<string, string>
  /** added to the sandbox's */
  env?: string[]
  /**
   * Timeout and IdleTimeout are as in CreateSandbox; 0 means the daemon's default lifetime, and the
   * sandbox's idle timeout.
   */
  timeout?: number
  idle_timeout?: number
}

/** Health is the answer to GET /healthz. */
export interface Health {
  /** "ok" */
  status: string
}

/**
 * HealthCheck is a program that the daemon runs in a sandbox again and again to learn if its
 * service works. Zero values are those of the image's HEALTHCHECK, else the defaults.
 */
export interface HealthCheck {
  /**
   * Test is "CMD", PROGRAM, ARG..., "CMD-SHELL", LINE, which /bin/sh runs, or "NONE". Exit code 0
   * means that the service works. Default: the image's.
   */
  test?: string[]
  /**
   * Interval is the time in seconds between the end of a check and the next one, from 1 on; default
   * 30. The first one is an interval after the start.
   */
  interval?: number
  /**
   * Timeout is the time in seconds after which a check is killed, and counts as failed; default 30.
   */
  timeout?: number
  /**
   * StartPeriod is the time in seconds after the start in which failed checks do not count; default
   * 0.
   */
  start_period?: number
  /** StartInterval is the Interval during StartPeriod, from 1 on; default 5. */
  start_interval?: number
  /** Retries is the number of failures in a row that make the sandbox unhealthy; default 3. */
  retries?: number
}

/** HealthResult is the outcome of one health check. */
export interface HealthResult {
  /** (RFC 3339) */
  started_at: string
  /** (RFC 3339) */
  ended_at: string
  /**
   * ExitCode is the exit code of the program; -1 if it could not be started or exceeded its
   * timeout.
   */
  exit_code: number
  /** first 4 KiB of stdout and stderr, or the reason for -1 */
  output?: string
}

/** HealthStatus is the outcome of a sandbox's health checks. */
export type HealthStatus = "starting" | "healthy" | "unhealthy"

/** HostAddress is a line of /etc/hosts. */
export interface HostAddress {
  name: string
  /** IPv4 or IPv6 */
  address: string
}

/**
 * IOLimits holds the ceilings on the block device of the sandbox's writable layer and the image's
 * layers. A zero value means no ceiling. Reads of the host image may use another device and are
 * then not limited. Writes pass through the page cache and are limited when the kernel writes them
 * back. That needs the memory controller and a file system that tracks the cgroup of a page: ext4,
 * xfs, btrfs, ext2 or f2fs. Elsewhere the kernel limits only reads and direct writes. There a
 * ceiling on writes is refused, and Enforced reports "direct" for one on reads.
 */
export interface IOLimits {
  /** share under contention, 1 to 10000, default 100 (io.weight) */
  weight?: number
  /** bytes per second (io.max) */
  read_bps?: number
  /** bytes per second */
  write_bps?: number
  /** operations per second */
  read_iops?: number
  /** operations per second */
  write_iops?: number
}

/**
 * IOStats counts transfers of one block device. Data that is still in the page cache is not
 * counted.
 */
export interface IOStats {
  /** "major:minor" */
  device: string
  read_bytes: number
  write_bytes: number
  read_ops: number
  write_ops: number
}

/**
 * IOUpdate changes IOLimits. An absent field stays; 0 removes a ceiling or restores the default
 * weight.
 */
export interface IOUpdate {
  weight?: number
  read_bps?: number
  write_bps?: number
  read_iops?: number
  write_iops?: number
}

/** Image describes a stored image. */
export interface Image {
  /** normalised: registry/repository:tag or @digest */
  reference: string
  /** of the platform's manifest, or of the host image's only layer */
  digest: string
  platform: string
  /** bytes of its compressed blobs */
  size: number
  layers: number
  /** time of the pull or import (RFC 3339) */
  pulled_at: string
  /**
   * SharedSize and UniqueSize are the bytes on disk, blobs and unpacked trees. Other images need
   * the shared part; removing the image under all its names frees the unique part. Only lists and
   * inspections set them.
   */
  shared_size?: number
  unique_size?: number
}

/**
 * ImageConfig is the configuration with which an image is run. Imports of root file systems take it
 * from the request.
 */
export interface ImageConfig {
  entrypoint?: string[]
  cmd?: string[]
  env?: string[]
  working_dir?: string
  user?: string
  labels?: Record<string, string>
  /** Volumes are the paths at which a sandbox of the image has volumes of its own. */
  volumes?: string[]
  /**
   * Ports are the ports on which the image's program listens, as "80/tcp". Nothing is published by
   * them.
   */
  ports?: string[]
  /** as in Settings */
  stop_signal?: string
  health_check?: HealthCheck
}

/** ImageDetail is the answer to GET /v1/images/inspect. */
export interface ImageDetail {
  /** normalised: registry/repository:tag or @digest */
  reference: string
  /** of the platform's manifest, or of the host image's only layer */
  digest: string
  platform: string
  /** bytes of its compressed blobs */
  size: number
  layers: number
  /** time of the pull or import (RFC 3339) */
  pulled_at: string
  /**
   * SharedSize and UniqueSize are the bytes on disk, blobs and unpacked trees. Other images need
   * the shared part; removing the image under all its names frees the unique part. Only lists and
   * inspections set them.
   */
  shared_size?: number
  unique_size?: number
  /** all references of the image */
  names: string[]
  /** names of sandboxes */
  used_by?: string[]
  /** last creation of a sandbox from it (RFC 3339) */
  used_at?: string
  /** as the image states, like the fields below (RFC 3339) */
  created?: string
  author?: string
  config: ImageConfig
  /** layers, lowest first */
  parts: ImageLayer[]
  history: ImageHistory[]
}

/** ImageHistory is one step of an image's history, as the image states it. */
export interface ImageHistory {
  /** (RFC 3339) */
  created?: string
  created_by?: string
  comment?: string
  empty_layer?: boolean
  /** of the layer's blob */
  size?: number
}

/** ImageLayer is one layer of an image. */
export interface ImageLayer {
  /** of the blob */
  digest: string
  diff_id: string
  chain_id: string
  media_type: string
  /** of the blob */
  size: number
  /** bytes of the unpacked files; 0 if unknown */
  tree_size?: number
  /** other images that need it */
  shared_by?: string[]
}

/** ImageList is the answer to GET /v1/images. */
export interface ImageList {
  images: Image[]
}

/** ImageProblem describes a damaged blob or tree. */
export interface ImageProblem {
  /** images that need it; "snapshot NAME" for a snapshot */
  images: string[]
  /** of the blob, or chain ID of the tree */
  digest: string
  detail: string
}

/**
 * ImagesImported is the answer to POST /v1/images/import; with progress=true the answer is one
 * PullEvent per line instead.
 */
export interface ImagesImported {
  images: Image[]
}

/** ImagesRemoved is the answer to DELETE /v1/images and POST /v1/images/prune. */
export interface ImagesRemoved {
  /** removed references */
  removed: string[]
  /** removed references whose image stays, because a sandbox uses it */
  untagged?: string[]
  /** removed steps of the build cache */
  steps?: number
  /** freed bytes of blobs and unpacked trees */
  bytes: number
}

/**
 * ImagesVerified is the answer to GET /v1/images/verify. docs/reference/api.md states the extent of
 * the proof.
 */
export interface ImagesVerified {
  /** blobs that were read */
  blobs: number
  /** their total size */
  bytes: number
  /** layers whose trees were compared */
  layers: number
  /** entries of trees that were examined */
  entries: number
  /** entries that only the sandboxes' own IDs may read */
  unseen: number
  /**
   * Snapshots counts the snapshot layers that were read. Each must equal its state at the time of
   * its creation; no blob exists to compare it with.
   */
  snapshots: number
  problems: ImageProblem[]
}

/** Language is one of GET /v1/languages. */
export interface Language {
  name: string
  aliases?: string[]
  /** of the source */
  file_name: string
  /** state can be kept between runs */
  contexts?: boolean
  libraries?: string
  /** Dockerfile of the project's images that has it */
  image?: string
}

/** LanguageList is the answer to GET /v1/languages, by name. */
export interface LanguageList {
  languages: Language[]
}

/**
 * Limits holds the ceilings requested for a sandbox. A zero value means the profile's default. If
 * the host cannot enforce an explicit value, the creation fails with CodeUnenforceable.
 */
export interface Limits {
  /** bytes (cgroup memory.max); the kernel kills beyond it */
  memory?: number
  /**
   * MemoryHigh is the size in bytes at which the kernel throttles the sandbox and reclaims its page
   * cache (cgroup memory.high). It kills no process for it.
   */
  memory_high?: number
  /** bytes of swap (cgroup memory.swap.max); nil means none */
  swap?: number
  /**
   * OOMGroup makes an out-of-memory kill end every process, and so the sandbox (cgroup
   * memory.oom.group). Otherwise the kernel kills one process that it chooses, and other execs go
   * on.
   */
  oom_group?: boolean
  /** cores, e.g. 0.5 (cgroup cpu.max) */
  cpus?: number
  /** share under contention, 1 to 10000, default 100 (cgroup cpu.weight) */
  cpu_weight?: number
  /** usable cores, e.g. "0-1,3" (cgroup cpuset.cpus) */
  cpuset?: string
  /** processes and threads (cgroup pids.max, else RLIMIT_NPROC) */
  pids?: number
  /** open descriptors per process (RLIMIT_NOFILE) */
  nofile?: number
  io?: IOLimits
  /**
   * Disk is the maximum number of bytes of allocated blocks that the sandbox has written, deleted
   * files that a process has open included. Beyond it the sandbox is ended, and its files stay; see
   * Enforced.Disk.
   */
  disk?: number
  /**
   * Inodes is the maximum number of files and directories that the sandbox has made or changed. If
   * it is zero and Disk is not, it is one for each 8 KiB of Disk, and at least 10000.
   */
  inodes?: number
}

/**
 * LimitsUpdate changes Limits. An absent field stays; a zero value restores the profile's default.
 */
export interface LimitsUpdate {
  /**
   * Memory cannot fall below the memory that is in use and cannot be reclaimed. Then the answer is
   * CodeConflict, and no process is killed.
   */
  memory?: number
  memory_high?: number
  /** 0 means none */
  swap?: number
  oom_group?: boolean
  cpus?: number
  cpu_weight?: number
  cpuset?: string
  /** may fall below the current number; no process can then be started */
  pids?: number
  /** always refused: a process keeps the limit of its start */
  nofile?: number
  io?: IOUpdate
  /** 0 means none; below the present usage the sandbox is ended */
  disk?: number
  inodes?: number
}

/**
 * ListEvent is one line of the streaming answer. A directory precedes its entries; the order is
 * otherwise arbitrary. The last line has Done or Error.
 */
export interface ListEvent {
  entry?: FileEntry
  done?: boolean
  /** with done, as in FileList */
  more?: boolean
  error?: Problem
}

/**
 * LogEntry is one line of the answer to GET /v1/sandboxes/{id}/logs: output of main processes, in
 * order, or a final Error.
 */
export interface LogEntry {
  /** time at which the daemon received it (RFC 3339) */
  time?: string
  stream?: string
  /** as in ExecEvent */
  text?: string
  /** (base64) */
  data?: string
  /** Dropped is the number of bytes of the process's output before this entry that are not kept. */
  dropped?: number
  error?: Problem
}

/** MakeDirectory is the body of POST /v1/sandboxes/{id}/mkdir. */
export interface MakeDirectory {
  /** absolute */
  path?: string
  /** replaces path (base64) */
  path_bytes?: string
  /**
   * Parents also creates missing parents, with mode 0755 and the same owner, and accepts an
   * existing directory.
   */
  parents?: boolean
  /** octal; default 0755 */
  mode?: string
  /** owner, as in CreateSandbox; default: the sandbox's user */
  user?: string
}

/**
 * MemoryStats counts bytes: of programs, of the page cache that they filled, and of the kernel on
 * their behalf.
 */
export interface MemoryStats {
  current?: number
  /** since Linux 5.19 */
  peak?: number
  swap?: number
  /** since Linux 6.5 */
  swap_peak?: number
  /** processes killed by the out-of-memory killer */
  oom_kills?: number
  /** limits.memory; absent if the kernel does not enforce it */
  limit?: number
  /**
   * Exceeded is the reason why the sandbox was ended, if it was ended for memory that no limit
   * counts.
   */
  exceeded?: string
}

/**
 * Mount puts a directory or a file of the host, or a volume, into a sandbox. Files of the host that
 * belong to the owner of Source belong to UID and GID inside. What the programs of that user write
 * there belongs to the owner of Source on the host. The daemon's user owns it, unless that is root.
 * A snapshot has nothing of what is mounted. Forks have the mounts of their origin. A start mounts
 * Source again, as it is then. Files of a volume belong to users of the sandbox. All sandboxes that
 * have the volume see the same owners. One that does not exist is made. A volume without files that
 * is mounted gets those that the image has at Target, unless NoCopy is set.
 */
export interface Mount {
  /** Type is MountBind or MountVolume. */
  type: string
  /**
   * Source is, of a bind, an absolute path on the host, in its shortest form and without links. It
   * lies below one of the directories that serve --mount-root names. Of a volume it is the name; if
   * it is empty, the sandbox gets a new volume that is removed with it.
   */
  source?: string
  /**
   * Target is an absolute path in its shortest form. Missing directories of it are made, and no
   * link is followed. It does not lie in /proc, /sys, /dev or a file system in memory.
   */
  target: string
  /** ReadOnly keeps every program of the sandbox from writing there. */
  read_only?: boolean
  /** Create makes missing directories of a bind's source when the sandbox is created, mode 0755. */
  create?: boolean
  /** NoCopy leaves an empty volume empty. It is for volumes. */
  no_copy?: boolean
  /** Anonymous is set in answers: the volume is removed with the last sandbox that has it. */
  anonymous?: boolean
  /**
   * UID and GID default to the user of the sandbox, if that is a number or root. All mounts of a
   * sandbox have the same. Of a volume they own the directory if it is new, and the image has none
   * there.
   */
  uid?: number
  gid?: number
}

/** MoveFile is the body of POST /v1/sandboxes/{id}/move. Each path is given as text or as bytes. */
export interface MoveFile {
  /** absolute; a link itself is moved */
  from?: string
  /** (base64) */
  from_bytes?: string
  /** the new path, not a directory to move into */
  to?: string
  /** (base64) */
  to_bytes?: string
  /**
   * Overwrite atomically replaces an existing target: a file by a file, an empty directory by a
   * directory.
   */
  overwrite?: boolean
}

/**
 * NamedNetwork is a network in which sandboxes reach each other; see Network.Join. It was made by
 * itself, or exists while a sandbox names it. Its name has up to 63 letters, digits and "_.-", and
 * begins with a letter or digit. In one whose name has capitals or dots, or is a top-level domain
 * such as com or de, sandboxes are found as NAME, and not as NAME.NETWORK.
 */
export interface NamedNetwork {
  name: string
  labels?: Record<string, string>
  /** CreatedAt is absent of a network that was not made by itself. (RFC 3339) */
  created_at?: string
  /**
   * Internal means that the network is no way out: sandboxes that are in internal networks only
   * reach each other and nothing else, whatever their mode.
   */
  internal?: boolean
  /** oldest first */
  sandboxes: NetworkMember[]
}

/** Network describes the network of a sandbox. */
export interface Network {
  mode: NetworkMode
  /**
   * Policy is a policy document of version 1, in YAML or JSON, at most 64 KiB; only for egress,
   * which needs one.
   */
  policy?: string
  budget?: NetworkBudget
  /**
   * Secrets are names of the caller's secrets, which the gateway puts into requests. The sandbox
   * has placeholders. They need a rule that inspects requests.
   */
  secrets?: string[]
  /**
   * Sandbox is the ID or name of a running sandbox of the same tenant, whose network this one
   * shares; only for mode sandbox. Requests about policy, budget, secrets, ports and flows go to
   * that sandbox. Responses have its ID.
   */
  sandbox?: string
  /**
   * Join names at most 8 networks of the tenant, with any mode but sandbox. The sandboxes in a
   * network reach each other by name: NAME, NAME.NETWORK or NAME.NETWORK.internal. A network exists
   * when it was made, and while a sandbox names it; see NamedNetwork for names. Later changes are
   * requests to connect and disconnect. In networks that are all internal, a sandbox reaches the
   * others alone, whatever its mode.
   */
  join?: string[]
  /**
   * Aliases are names by which the others in a network of Join, the key, find the sandbox, too; at
   * most 16 in each. An alias has up to 63 letters, digits, inner hyphens and underscores. Forks
   * and sandboxes of snapshots do not inherit it. Of several sandboxes with an alias, the one that
   * joined first has it, and a sandbox of that name comes before all.
   */
  aliases?: Record<string, string[]>
}

/**
 * NetworkBudget bounds what a sandbox's network does while the sandbox runs. What exceeds it is
 * refused and recorded. Zero means unbounded, in each field.
 */
export interface NetworkBudget {
  /** from the sandbox, of connections */
  bytes_out?: number
  /** to the sandbox */
  bytes_in?: number
  /** number of TCP connections */
  connections?: number
  /** number of different names, and addresses without one */
  hosts?: number
  /** number of DNS questions */
  queries?: number
  /** The rates are per second; two seconds' worth may come at once. */
  connection_rate?: number
  query_rate?: number
}

/** NetworkList is the answer to GET /v1/networks, in the order of the names. */
export interface NetworkList {
  networks: NamedNetwork[]
}

/** NetworkMember is a sandbox in a named network. */
export interface NetworkMember {
  id: string
  name: string
  state: SandboxState
  /** Address is the sandbox's address for the other members; absent while it does not run. */
  address?: string
  /** in this network */
  aliases?: string[]
}

/** NetworkMode selects the network of a sandbox. None of them is the host's. */
export type NetworkMode = "none" | "full" | "egress" | "sandbox"

/** NetworkStats are totals of flows, since the daemon that serves the sandbox has started. */
export interface NetworkStats {
  /** that have ended, or were refused */
  connections: number
  /** DNS questions that the host's resolver was asked, or that were refused */
  queries: number
  /** flows of any kind */
  refused: number
  /** from the sandbox, of connections that have ended */
  bytes_out: number
  /** to the sandbox */
  bytes_in: number
}

/** NetworksRemoved is the answer to POST /v1/networks/prune. */
export interface NetworksRemoved {
  /** names */
  removed: string[]
}

/** PidsStats counts processes and threads, the init's included. */
export interface PidsStats {
  current?: number
  /** since Linux 6.1 */
  peak?: number
  /** process starts refused by limits.pids */
  refused?: number
  /** limits.pids; absent if no cgroup enforces it */
  limit?: number
}

/**
 * Pool is the state of one warm pool. The daemon keeps sandboxes of one image and profile ready, so
 * that a creation need not wait. No list shows a pooled sandbox, and no limit on creations counts
 * it.
 */
export interface Pool {
  /** reference as configured */
  image: string
  profile: string
  /** for sandboxes with a network */
  network?: boolean
  /** target number of ready sandboxes; with Most, derived from the last ten minutes */
  size: number
  /** maximum of Size, for a pool that adapts */
  most?: number
  /** current number of ready sandboxes */
  ready: number
  /**
   * Hits and Misses count the creations of this image and profile since the daemon's start. A hit
   * took a sandbox from the pool. A miss found none ready, or asked for a property that a running
   * sandbox cannot be given, such as a nofile limit.
   */
  hits: number
  misses: number
  /** Context describes the interpreters that wait in the sandboxes; nil if the pool has none. */
  context?: PoolContext
  /** Error is the reason why the pool could not be filled. */
  error?: string
}

/**
 * PoolContext is the state of the interpreters of a warm pool. Each waits in a ready sandbox. It
 * becomes the first context of the sandbox if the request for the context names this language and
 * these modules alone, and nothing was done in the sandbox before.
 */
export interface PoolContext {
  language: string
  preload?: string[]
  /** current number of interpreters that wait */
  ready: number
  /** contexts that had one, since the daemon's start */
  hits: number
  /** Error is the reason why one could not be started. */
  error?: string
}

/**
 * PortMapping publishes a port of a sandbox at the host: at an address, or as a Unix socket.
 * Connections and datagrams reach programs that listen on the sandbox's loopback address or on all
 * addresses.
 */
export interface PortMapping {
  /** of the host; default 127.0.0.1; none of a Unix socket */
  address?: string
  /** 0: one that is free, or a Unix socket */
  host_port: number
  /**
   * Chosen is true in answers if the request has named no host port. The daemon keeps the one that
   * it has chosen, unless another program has it when the sandbox or the daemon starts again.
   * Requests need not set it: it is ignored.
   */
  chosen?: boolean
  /**
   * Socket is the path of a Unix socket, which only the daemon's user can open. It lies in the
   * directory ports of the daemon's runtime directory: a request may have the file's name alone.
   */
  socket?: string
  /** in the sandbox */
  port: number
  /** "tcp", the default, or "udp" */
  protocol?: string
}

/**
 * Pressure is the share of time in which some, or all, of the sandbox's processes waited for a
 * resource.
 */
export interface Pressure {
  some?: PressureLine
  full?: PressureLine
}

/** PressureLine holds shares in percent, over the last 10, 60 and 300 seconds. */
export interface PressureLine {
  avg10: number
  avg60: number
  avg300: number
  /** since the sandbox's start */
  total_ms: number
}

/**
 * Problem is an error in the form of RFC 9457. The client returns the Problem that it received as a
 * Go error, so that errors.As works across the socket.
 */
export interface Problem {
  code: Code
  /** the code in words */
  title: string
  /** status of the response */
  status: number
  /** operation and cause, with the names involved */
  detail: string
  /** remedy */
  hint?: string
  /** Findings are those of the code policies, by line; only of CodeRefused. */
  findings?: CodeFinding[]
}

/** Process is one process of a sandbox, its init excluded. */
export interface Process {
  pid: number
  ppid: number
  uid: number
  /** one letter, as in ps(1) */
  state: string
  /** (RFC 3339) */
  started_at: string
  cpu_ms: number
  /** bytes */
  rss: number
  /** the kernel's name for it */
  name: string
  /** the first 4 KiB; invalid UTF-8 replaced */
  argv?: string[]
  truncated?: boolean
  /** ID of its running exec; absent if that has exited (state Z) */
  exec?: string
}

/** ProcessList is the answer to GET /v1/sandboxes/{id}/processes: at most 4096, ordered by pid. */
export interface ProcessList {
  processes: Process[]
}

/** Profile is a named policy that restricts sandboxes. */
export interface Profile {
  name: string
  description: string
  /** Source is the file that it was read from; empty for a built-in profile. */
  source?: string
  /** bounding set of every program, inside the sandbox's own user namespace */
  capabilities: string[]
  /** NonRoot refuses programs that run as root of the sandbox; User is the default user instead. */
  non_root: boolean
  /** "uid:gid" */
  user?: string
  /** if neither the image nor the request names one */
  cwd?: string
  env?: string[]
  read_only_root: boolean
  mounts?: Scratch[]
  masked_paths: string[]
  readonly_paths: string[]
  /** of a sandbox that requests none */
  limits: Limits
  syscalls: number
  /**
   * Seccomp is the filter in the form of the OCI runtime specification. Lists of profiles omit it.
   */
  seccomp?: unknown
}

/** ProfileList is the answer to GET /v1/profiles, sorted by name. */
export interface ProfileList {
  profiles: Profile[]
}

/** PruneImages is the optional body of POST /v1/images/prune. */
export interface PruneImages {
  /** every image without a sandbox, not only those whose tag has moved on */
  all?: boolean
}

/**
 * PruneNetworks is the optional body of POST /v1/networks/prune. It removes networks that no
 * sandbox is in.
 */
export interface PruneNetworks {
  /** Labels are the labels that they must have. Networks with LabelKeep always stay. */
  labels?: Record<string, string>
}

/** PruneSandboxes is the optional body of POST /v1/sandboxes/prune. It removes ended sandboxes. */
export interface PruneSandboxes {
  /**
   * OlderThan is the minimum time since their end, in seconds; 0 removes all. The default is an
   * hour, so that a waiting client can still read the exit.
   */
  older_than?: number
  /** Labels are the labels that they must have. Sandboxes with LabelKeep always stay. */
  labels?: Record<string, string>
}

/**
 * PruneSnapshots is the body of POST /v1/snapshots/prune. It removes snapshots that no sandbox
 * depends on; at least one field is required.
 */
export interface PruneSnapshots {
  /** minimum age in seconds, since creation or import */
  older_than?: number
  /** required labels; snapshots with LabelKeep always stay */
  labels?: Record<string, string>
}

/**
 * PruneVolumes is the optional body of POST /v1/volumes/prune. It removes volumes that no sandbox
 * has.
 */
export interface PruneVolumes {
  /** All removes named ones too, and not only anonymous ones. */
  all?: boolean
  /** Labels are the labels that they must have. Volumes with LabelKeep always stay. */
  labels?: Record<string, string>
}

/**
 * PullEvent is one line of progress of a pull, push or import. The last line has Image, Images or
 * Error.
 */
export interface PullEvent {
  /** digest of the layer */
  layer?: string
  /** "downloading", "applying", "uploading", "exists", "done" */
  status?: string
  /** so far */
  bytes?: number
  /** of the compressed layer */
  total?: number
  image?: Image
  /** of an import */
  images?: Image[]
  error?: Problem
}

/** PullImage is the body of POST /v1/images/pull. The answer is one PullEvent per line. */
export interface PullImage {
  reference: string
  /** "linux/amd64"; default: the host's */
  platform?: string
  /**
   * Insecure allows plain HTTP, and HTTPS without a verified certificate. Registries on loopback
   * may always use plain HTTP.
   */
  insecure?: boolean
  /** Auth replaces the credentials of the daemon's user for this request. It is not kept. */
  auth?: RegistryAuth
}

/** PushImage is the body of POST /v1/images/push. The answer is one PullEvent per line. */
export interface PushImage {
  /** of a stored image, and its destination */
  reference: string
  /** as in PullImage */
  insecure?: boolean
  /**
   * Platform is the platform to send, such as "linux/amd64". One platform of an image is stored;
   * the push fails if it is a different one. Default: the stored platform.
   */
  platform?: string
  /** as in PullImage */
  auth?: RegistryAuth
}

/**
 * RegistryAuth are credentials for the registry of one image. The token replaces name and password.
 */
export interface RegistryAuth {
  username?: string
  password?: string
  /** exchanged for tokens at the registry's token server */
  identity_token?: string
}

/** RegistryChecked is the answer to POST /v1/registries/check. */
export interface RegistryChecked {
  accepted: boolean
  /** status with which the registry refuses the credentials */
  refusal?: string
}

/** RenameSandbox is the body of POST /v1/sandboxes/{id}/rename. */
export interface RenameSandbox {
  /** rules as in CreateSandbox; required */
  name: string
}

/**
 * ResumeAgentRun is the body of POST /v1/agent/runs/{run}/resume. Absent fields, except the key,
 * come from the record.
 */
export interface ResumeAgentRun {
  model?: AgentModel
  budget?: AgentBudget
  policy?: string
  policy_hook?: string
  /** message to the model before it continues */
  message?: string
}

/** Rlimit is a pair of limits as in setrlimit(2), in its units. 18446744073709551615 means none. */
export interface Rlimit {
  soft: number
  hard: number
}

/**
 * RollbackSandbox is the body of POST /v1/sandboxes/{id}/rollback. All later writes and all
 * processes of the sandbox are lost. ID, name, labels and limits stay. A sandbox that ran or was
 * paused runs again, with a new deadline.
 */
export interface RollbackSandbox {
  /** ID or name; of any sandbox with the same image */
  snapshot: string
}

/**
 * RunRequest is the body of POST /v1/run: it creates a sandbox, runs one program and deletes the
 * sandbox. The answer is that of an exec, buffered or streaming.
 */
export interface RunRequest {
  sandbox?: CreateSandbox
  exec: ExecRequest
}

/** Sandbox describes a sandbox. */
export interface Sandbox {
  id: string
  name: string
  /** requested reference */
  image: string
  /** of the manifest, or of the host image's layer */
  image_digest: string
  /** ID of its origin, which may be deleted */
  snapshot?: string
  state: SandboxState
  /** reason of "stopped" or "lost" */
  reason?: string
  /** of its init, on the host */
  pid?: number
  profile: string
  labels?: Record<string, string>
  limits?: Limits
  enforced: Enforced
  network?: Network
  ports?: PortMapping[]
  env?: string[]
  cwd: string
  user: string
  /** (RFC 3339) */
  created_at: string
  /** of its latest run, idle ones not counted; absent if it has not run (RFC 3339) */
  started_at?: string
  /** time at which its end was observed; zero while it lives (RFC 3339) */
  ended_at?: string
  /** (RFC 3339) */
  deadline: string
  /** seconds */
  idle_timeout: number
  /**
   * IdleDeadline is the time at which the idle timeout ends it if nothing uses it before. It is
   * absent while the sandbox is in use, paused or ended, and in answers to changes. (RFC 3339)
   */
  idle_deadline?: string
  /** argv of its main process */
  command?: string[]
  tty?: boolean
  stdin_open?: boolean
  /** Restarts is how often its restart policy has started it since a client did. */
  restarts?: number
  /**
   * Entrypoint and Cmd are the image's ENTRYPOINT and CMD, or what replaced them. A client that
   * runs the image's program executes Entrypoint with its own arguments, else with Cmd. Both are
   * absent if they have more than 128 KiB.
   */
  entrypoint?: string[]
  cmd?: string[]
  /**
   * Hostname has at most 64 letters, digits, inner hyphens and dots. Default: the sandbox's name.
   */
  hostname?: string
  /**
   * ReadOnly makes the root read-only. Only /dev, /proc, Tmpfs and the profile's mounts are
   * writable, so a program that needs /tmp or /run needs a Tmpfs there.
   */
  read_only?: boolean
  /**
   * Tmpfs are at most 16 writable file systems in memory, none within another. They hide what the
   * image has there. The default size is 64 MiB, the default mode 1777 (octal).
   */
  tmpfs?: Scratch[]
  /**
   * Mounts are at most 16 directories and files of the host and volumes, none within another or
   * within a Tmpfs. The image's VOLUMEs are added to them, each as a volume without a name, unless
   * one of these is at the same place. Tenants of a daemon that serves several have volumes only.
   */
  mounts?: Mount[]
  /** ShmSize is the size of /dev/shm in bytes; default 64 MiB. */
  shm_size?: number
  /**
   * Rlimits are resource limits of every process, named as in ExecRequest, whose own replace them.
   * A nofile also raises limits.nofile unless that is given.
   */
  rlimits?: Record<string, Rlimit>
  /**
   * Hosts are at most 256 lines more of /etc/hosts. A sandbox without a network then has a file of
   * its own over the image's, too.
   */
  hosts?: HostAddress[]
  /**
   * CapDrop and CapAdd change the capabilities of the profile: names with or without CAP_, or ALL.
   * CapAdd names only capabilities that the profile has, and keeps them from a CapDrop of ALL.
   */
  cap_drop?: string[]
  cap_add?: string[]
  /**
   * StopSignal is sent to every process when the sandbox is stopped. Default: the image's
   * STOPSIGNAL, else SIGTERM.
   */
  stop_signal?: string
  /**
   * Restart is "no" (the default), "on-failure", "on-failure:N" with at most N restarts, "always"
   * or "unless-stopped". It starts a sandbox again whose main process has ended: first after 0.1 s,
   * then after twice the time before, up to a minute; a process that ran for 10 s begins anew. A
   * sandbox is not started again after its deadline, which a restart leaves as it is, nor after an
   * idle timeout or a stop; "always" starts a stopped one when the daemon starts. It needs a main
   * process.
   */
  restart?: string
  /**
   * HealthCheck is the check of the sandbox's service. Default: the image's HEALTHCHECK for a
   * sandbox with a main process, else none. An empty object asks for the image's in any case.
   */
  health_check?: HealthCheck
  /**
   * AutoRemove removes the sandbox with its files and log when it has ended, for whatever reason.
   * The daemon does it, or the next one. A request that waits for the end gets the exit all the
   * same. It cannot be rolled back, and has no restart policy. A fork is not removed so.
   */
  auto_remove?: boolean
  /**
   * Annotations are notes of the client that made the sandbox, for itself: at most 64 keys and 256
   * KiB in all. Nothing here reads them.
   */
  annotations?: Record<string, string>
  /**
   * Workspace is a directory of the host to work on. Only the daemon's own user can name one. A
   * fork has none.
   */
  workspace?: Workspace
  /** Health is absent without a health check. */
  health?: SandboxHealth
  /** Exit is the last exit of its main process. It is absent while that runs, or if unknown. */
  exit?: SandboxExit
}

/** SandboxCommitted is the answer to POST /v1/sandboxes/{id}/commit. */
export interface SandboxCommitted {
  image: Image
  /** omitted items as in SandboxDiff, and extended attributes of files */
  skipped?: string[]
  skipped_more?: number
}

/** SandboxDiff is the answer to GET /v1/sandboxes/{id}/diff. */
export interface SandboxDiff {
  changes: Change[]
  /** More reports that the changes exceed one answer. Then Skipped is empty. */
  more?: boolean
  /**
   * Skipped holds the first fifty items that a commit would omit, with the reason: sockets, names
   * that no layer can hold, and extended attributes of directories. Those of files are not checked
   * here; a commit may omit some of them too.
   */
  skipped?: string[]
  /** number of further items */
  skipped_more?: number
}

/**
 * SandboxExit describes how the main process of a sandbox ended. If the whole sandbox was killed
 * while it ran (a stop without grace, a deadline, out of memory), the signal is SIGKILL.
 */
export interface SandboxExit {
  /** exit code; 128+n after signal n */
  code: number
  /** "SIGKILL", ... */
  signal?: string
  /** the out-of-memory killer acted in the sandbox's cgroup during the exec */
  oom?: boolean
  /** killed at its timeout */
  timeout?: boolean
  /** (RFC 3339) */
  started_at: string
  /** (RFC 3339) */
  ended_at: string
  /** absent if unknown */
  usage?: Usage
}

/** SandboxFiles is the disk space of one sandbox, without its image and snapshots. */
export interface SandboxFiles {
  id: string
  name: string
  state: SandboxState
  /** sizes of the files that it has written or changed, holes included */
  bytes: number
  /** number of these, with directories and deletions */
  files: number
  /** bytes */
  log: number
  /** Unknown is the reason why Bytes and Files are not known. */
  unknown?: string
}

/**
 * SandboxForked is the answer to POST /v1/sandboxes/{id}/fork. Either all sandboxes are created, or
 * none and the answer is an error.
 */
export interface SandboxForked {
  sandboxes: Sandbox[]
  /** as in Snapshot */
  consistent: boolean
  skipped?: string[]
  skipped_more?: number
}

/**
 * SandboxHealth is the outcome of a sandbox's health checks since it was started. Of a sandbox that
 * has ended it is the last one.
 */
export interface SandboxHealth {
  status: HealthStatus
  /** number of failed checks since the last success */
  failing_streak: number
  /** begin of the start period (RFC 3339) */
  started_at: string
  /**
   * Log has the last five results, oldest first. After a restart of the daemon the latest may be
   * missing.
   */
  log?: HealthResult[]
}

/** SandboxList is the answer to GET /v1/sandboxes, oldest first. */
export interface SandboxList {
  sandboxes: Sandbox[]
}

/** SandboxRef identifies a sandbox. */
export interface SandboxRef {
  id: string
  name: string
}

/** SandboxState is the phase of a sandbox's life. The zero value is not a state. */
export type SandboxState = "creating" | "running" | "paused" | "stopped" | "lost"

/** SandboxStats are the counters of one sandbox of several. */
export interface SandboxStats {
  id: string
  name: string
  /** (RFC 3339) */
  at: string
  /** since the sandbox's start */
  wall_ms: number
  memory?: MemoryStats
  cpu?: CPUStats
  pids?: PidsStats
  /** one per block device */
  io?: IOStats[]
  /** Pressure holds the time that processes waited for "cpu", "memory" and "io" (PSI). */
  pressure?: Record<string, Pressure>
  /** absent without a network */
  network?: NetworkStats
  /** absent without a limit on disk or inodes */
  disk?: DiskStats
}

/** SandboxesRemoved is the answer to POST /v1/sandboxes/prune. */
export interface SandboxesRemoved {
  removed: SandboxRef[]
  /** number of sandboxes that stay because they ended too recently */
  recent: number
}

/**
 * Scratch is a writable file system in memory. It counts towards the sandbox's memory, is not part
 * of any snapshot, diff or commit, and vanishes when the sandbox stops.
 */
export interface Scratch {
  path: string
  /** bytes */
  size: number
  /** permissions of its root, as a number */
  mode: number
  uid?: number
  gid?: number
  /** NoExec keeps programs on it from being executed. */
  noexec?: boolean
}

/** Secret describes a secret. No answer has its value. */
export interface Secret {
  name: string
  kind: SecretKind
  /** name of the header, of kind header */
  header?: string
  host: string
  port: number
  methods?: string[]
  paths?: string[]
  always?: boolean
  variable?: string
  /** it is of the daemon's file (--secrets), which alone changes it */
  file?: boolean
  /** absent for secrets of the file (RFC 3339) */
  created_at?: string
  /** of the last PUT; absent for secrets of the file (RFC 3339) */
  changed_at?: string
  /**
   * Error is the reason for which a stored secret cannot be read; only its name is known then. No
   * sandbox gets it. To set it again or to remove it helps.
   */
  error?: string
}

/** SecretKind is the way in which a request carries a secret. */
export type SecretKind = "bearer" | "basic" | "header" | "aws"

/** SecretList is the answer to GET /v1/secrets, in the order of the names. */
export interface SecretList {
  secrets: Secret[]
}

/** SetSecret is the body of PUT /v1/secrets/{secret}. */
export interface SetSecret {
  kind: SecretKind
  /**
   * Value is the token, the password, the header's value or the secret key: 8 to 16,384 bytes of
   * visible ASCII.
   */
  value: string
  /** of basic; empty for the one that the client sends */
  user?: string
  /** name of the header; for kind header */
  header?: string
  /** of aws */
  access_key_id?: string
  /** of aws, if the key has one */
  session_token?: string
  /** the one host that gets the secret */
  host: string
  /** default 443 */
  port?: number
  /** Methods and Paths select requests as in rules of a policy. Empty means all. */
  methods?: string[]
  paths?: string[]
  /** Always puts the secret also into requests that lack the header; not for aws. */
  always?: boolean
  /**
   * Variable is the environment variable of new sandboxes that has the placeholder. Default: none.
   */
  variable?: string
}

/** Shutdown is the body of POST /v1/system/shutdown. */
export interface Shutdown {
  /**
   * KeepSandboxes leaves the launcher and its sandboxes running; the next daemon adopts them.
   * Without it and StopSandboxes every sandbox is deleted.
   */
  keep_sandboxes?: boolean
  /**
   * StopSandboxes stops every sandbox, with the default grace period, and keeps its files and logs.
   * The next daemon can start it again.
   */
  stop_sandboxes?: boolean
}

/**
 * Snapshot is the file system of a sandbox at one time. It holds the files that the sandbox had
 * changed, not its processes, and depends on the sandbox's image.
 */
export interface Snapshot {
  id: string
  name?: string
  comment?: string
  labels?: Record<string, string>
  /** ID of its source, which may be deleted; empty if imported */
  sandbox?: string
  /** name of its source at that time */
  sandbox_name?: string
  /** reference that the sandbox was created with */
  image: string
  /** digest of that image, which is kept while the snapshot exists */
  image_digest: string
  /** its own, and those of the snapshots below it */
  layers: number
  /** (RFC 3339) */
  created_at: string
  /** bytes of files in its own layer */
  size: number
  /** bytes of files in the layers below, which belong to other snapshots */
  shared_size?: number
  /** files, directories and deletions in its own layer */
  entries: number
  /**
   * Consistent reports that all processes of the sandbox were frozen while its files were read.
   * Without a cgroup they cannot be: the snapshot may then hold partial writes, and fails if a file
   * changes while it is read.
   */
  consistent: boolean
  /**
   * Network is the network of the source sandbox. A sandbox created from the snapshot gets it too,
   * unless its request has another. An imported snapshot has none.
   */
  network?: Network
  /**
   * Skipped lists files that no snapshot can hold, as in SandboxCommitted. Only the answer to the
   * creation holds it.
   */
  skipped?: string[]
  skipped_more?: number
}

/** SnapshotList is the answer to GET /v1/snapshots, oldest first. */
export interface SnapshotList {
  snapshots: Snapshot[]
}

/** SnapshotRemoved is the answer to DELETE /v1/snapshots/{id}. */
export interface SnapshotRemoved {
  /**
   * Bytes is the size of the files that were removed. Layers that sandboxes or other snapshots need
   * stay until the last of these is deleted.
   */
  bytes: number
}

/** SnapshotsRemoved is the answer to POST /v1/snapshots/prune. */
export interface SnapshotsRemoved {
  /** names, or IDs of snapshots without a name */
  removed: string[]
  /** size of the removed files */
  bytes: number
}

/**
 * StartAgentRun is the body of POST /v1/agent/runs. Absent fields have the defaults of `sandboxd
 * agent run`, with the daemon's settings and environment.
 */
export interface StartAgentRun {
  /** the task */
  query: string
  model: AgentModel
  image?: string
  /**
   * InputDir is an absolute path on the daemon's host, below a directory that serve --agent-inputs
   * allows. Its content is copied into the sandbox.
   */
  input_dir?: string
  /** YAML text */
  prompt_config?: string
  /** memory, cpus and pids */
  limits?: Limits
  /** of the sandbox */
  network?: Network
  budget?: AgentBudget
  max_tokens_per_call?: number
  temperature?: number
  extra_body?: Record<string, unknown>
  /** name of a preset, or YAML */
  policy?: string
  /** service for the policy's "ask"; without one "ask" denies */
  policy_hook?: string
  snapshot_turns?: boolean
  output_deny?: string[]
  /** paths in the sandbox that are collected beside the output directory */
  collect?: string[]
  /** keep links that lead out of the output directory */
  output_links?: boolean
  /** bytes */
  output_limit?: number
  /** bytes */
  output_file_limit?: number
}

/**
 * StartSandbox is the optional body of POST /v1/sandboxes/{id}/start. A sandbox that is "stopped"
 * or "lost" runs again with its files, ID, name, labels and limits. Of its processes only the main
 * process is started.
 */
export interface StartSandbox {
  /**
   * Timeout is the time in seconds after which the sandbox is stopped; 0 means the timeout of its
   * creation.
   */
  timeout?: number
  /** Idle runs the sandbox without its main process, for example to inspect its files. */
  idle?: boolean
}

/**
 * Stats is the answer to GET /v1/sandboxes/{id}/stats: the kernel's counters for a running sandbox,
 * its init included. A figure that the kernel does not report is absent, never 0: the controller
 * may not be delegated, or the kernel may be too old.
 */
export interface Stats {
  /** (RFC 3339) */
  at: string
  /** since the sandbox's start */
  wall_ms: number
  memory?: MemoryStats
  cpu?: CPUStats
  pids?: PidsStats
  /** one per block device */
  io?: IOStats[]
  /** Pressure holds the time that processes waited for "cpu", "memory" and "io" (PSI). */
  pressure?: Record<string, Pressure>
  /** absent without a network */
  network?: NetworkStats
  /** absent without a limit on disk or inodes */
  disk?: DiskStats
}

/**
 * StatsList is the answer to GET /v1/stats: the counters of the caller's running and paused
 * sandboxes, oldest first, or of those that the request names, in its order.
 */
export interface StatsList {
  sandboxes: SandboxStats[]
}

/**
 * StopSandbox is the optional body of POST /v1/sandboxes/{id}/stop. Every process gets SIGTERM, and
 * one that ignores it, as interactive shells do, SIGHUP. The answer is sent when all have ended and
 * the sandbox is "stopped". Its files are kept. A sandbox that has ended is left unchanged.
 */
export interface StopSandbox {
  /**
   * Grace is the time in seconds after which remaining processes are killed; 0 kills at once.
   * Default: DefaultGrace.
   */
  grace?: number
  /** Signal is sent instead of the sandbox's stop_signal. */
  signal?: string
  /**
   * Main asks and awaits the main process alone. Other processes are killed when it has ended.
   * Without a main process, all processes are asked.
   */
  main?: boolean
}

/** SystemInfo is the answer to GET /v1/system. */
export interface SystemInfo {
  version: string
  uid: number
  rootless: boolean
  data_dir: string
  socket: string
  /** on the host */
  launcher_pid: number
  sandboxes: number
  /** restrictions of a sandbox with the defaults */
  enforced: Enforced
  /** Landlock version that confines the daemon; 0 means unconfined */
  confined: number
  /**
   * ErrandsGone reports that the broker process has died, which performs the operations that the
   * confined daemon cannot. The daemon must be restarted; the checks list the failing operations.
   */
  errands_gone?: boolean
  pools?: Pool[]
  /**
   * Goroutines and HeapLive describe the daemon itself: its goroutines, and the heap bytes in use
   * at the last garbage collection. For equal numbers of sandboxes and requests they stay level;
   * continued growth is a defect.
   */
  goroutines: number
  heap_live: number
}

/** TagImage is the body of POST /v1/images/tag. */
export interface TagImage {
  source: string
  /** registry/repository:tag; an existing image loses the name */
  target: string
}

/** TakeSnapshot is the optional body of POST /v1/sandboxes/{id}/snapshots. */
export interface TakeSnapshot {
  /** unique among snapshots; same rules as a sandbox's; default: none */
  name?: string
  /** as a sandbox's */
  labels?: Record<string, string>
  /** at most 1024 bytes */
  comment?: string
}

/** TerminalSize is the size of a terminal in characters. */
export interface TerminalSize {
  rows: number
  cols: number
}

/**
 * UpdateSandbox is the body of PATCH /v1/sandboxes/{id}: changes to a running sandbox. Absent
 * fields stay. Either all changes are applied, or none and the answer is an error.
 */
export interface UpdateSandbox {
  limits?: LimitsUpdate
  /** Labels are merged by name; null removes a label. */
  labels?: Record<string, string | null>
  /**
   * Timeout is the time in seconds from now after which the sandbox is stopped, or -1, Never; 0
   * keeps its deadline.
   */
  timeout?: number
  /** IdleTimeout is as in CreateSandbox; 0 keeps the current one. */
  idle_timeout?: number
  /**
   * Network replaces mode and policy of a sandbox that has a network, whose budget stays.
   * Connections that the new policy refuses are reset. A running one without a network cannot be
   * given one. Of a sandbox that does not run, network and restart are all that can be changed.
   */
  network?: Network
  /**
   * Restart replaces the restart policy, as in Settings. It holds from the next end on, and for a
   * restart that is due.
   */
  restart?: string
}

/** Usage holds the resources that an exec or a sandbox consumed. */
export interface Usage {
  wall_ms: number
  /** user and system time, of the process and its waited-for children */
  cpu_ms: number
  /** bytes of the largest process, as in getrusage(2) */
  memory_peak?: number
}

/**
 * Volume is a directory that sandboxes of one tenant share, and that stays when they are deleted.
 */
export interface Volume {
  name: string
  labels?: Record<string, string>
  /** (RFC 3339) */
  created_at: string
  /**
   * Size is the maximum disk space of its files in bytes, Inodes their maximum number; 0 means
   * none. Beyond it the sandboxes that can write to the volume are ended. See Limits.
   */
  size?: number
  inodes?: number
  /**
   * Anonymous means that its name was made up. Prune removes such a volume without being asked for
   * all.
   */
  anonymous?: boolean
  /** Bound means that it was made with a sandbox, and is removed with the last one that has it. */
  bound?: boolean
  /** Sandboxes are those that have it, running or not. It is not removed while there are any. */
  sandboxes: SandboxRef[]
  /** Usage is in the answer about a single volume. */
  usage?: VolumeUsage
}

/** VolumeFiles is the disk space of one volume. */
export interface VolumeFiles {
  name: string
  /** of allocated blocks */
  bytes: number
  /** number of files, directories and links */
  inodes: number
  /** number of those that have it */
  sandboxes: number
  /** Unknown is the reason why Bytes and Inodes are not known. */
  unknown?: string
}

/** VolumeImported is the answer to POST /v1/volumes/import. */
export interface VolumeImported {
  name: string
  labels?: Record<string, string>
  /** (RFC 3339) */
  created_at: string
  /**
   * Size is the maximum disk space of its files in bytes, Inodes their maximum number; 0 means
   * none. Beyond it the sandboxes that can write to the volume are ended. See Limits.
   */
  size?: number
  inodes?: number
  /**
   * Anonymous means that its name was made up. Prune removes such a volume without being asked for
   * all.
   */
  anonymous?: boolean
  /** Bound means that it was made with a sandbox, and is removed with the last one that has it. */
  bound?: boolean
  /** Sandboxes are those that have it, running or not. It is not removed while there are any. */
  sandboxes: SandboxRef[]
  /** Usage is in the answer about a single volume. */
  usage?: VolumeUsage
  /** number of entries that were unpacked */
  files: number
  /** of their contents */
  bytes: number
  /** Skipped lists entries that no volume can have, such as devices, as in SandboxCommitted. */
  skipped?: string[]
  skipped_more?: number
}

/** VolumeList is the answer to GET /v1/volumes, by name. */
export interface VolumeList {
  volumes: Volume[]
}

/** VolumeUsage is the disk space of a volume's files, counted for the answer. */
export interface VolumeUsage {
  /** of allocated blocks */
  bytes: number
  inodes: number
  /** Unknown is the reason why they are not known. */
  unknown?: string
}

/** VolumesRemoved is the answer to POST /v1/volumes/prune. */
export interface VolumesRemoved {
  /** names */
  removed: string[]
  /** disk space of the removed files, as far as it was known */
  bytes: number
}

/**
 * Workspace is a directory of the daemon's host that a sandbox sees as its own: programs may change
 * everything in it, and the host's files stay as they are. The changes lie in the sandbox's own
 * storage, and end with it. GET /v1/sandboxes/{id}/changes returns them.
 */
export interface Workspace {
  /** Source is the absolute path of the directory, without links in it. */
  source: string
  /**
   * Target is where programs see it. Default: the working directory that request or image name,
   * else "/workspace".
   */
  target?: string
  /**
   * Device and Inode are of the directory that the client means, as stat(2) has them. Each start of
   * the sandbox compares them with those of Source, and fails if they differ.
   */
  device: number
  inode: number
  /**
   * Hidden are paths below Source that programs do not see, also if the host gets a file there
   * later. They are relative, in their shortest form, and chosen once, when the sandbox is created.
   * At most MaxHidden with MaxHiddenBytes bytes together.
   */
  hidden?: string[]
  /**
   * UID and GID are the ids of the sandbox's programs, which own the files where the mount's ids
   * are mapped; set by the daemon.
   */
  uid?: number
  gid?: number
  /**
   * Since is the time before which the sandbox has seen no file of the directory; set by the
   * daemon. A file whose status on the host has changed since is in conflict with a change of the
   * sandbox. (RFC 3339)
   */
  since?: string
}
