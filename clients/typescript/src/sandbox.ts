import type { IncomingMessage } from 'node:http'
import type {
  CreateSandbox, Language, Limits, Network, PortMapping, Sandbox as SandboxRecord, SandboxForked, SandboxList, SandboxState, Snapshot, UpdateSandbox,
} from './api.js'
import { lines } from './bytes.js'
import { Code, type Context, type CreateContextOpts, type Execution, type RunCodeOpts } from './code.js'
import { Commands, Pty, environment, pick, seconds } from './commands.js'
import { Connection, body, type ConnectionOpts, type RequestOpts } from './connection.js'
import { InvalidArgumentError, NotFoundError, SandboxError } from './errors.js'
import { Files } from './files.js'
import { Ports } from './ports.js'

/** SandboxOpts are options of a new sandbox. */
export interface SandboxOpts extends ConnectionOpts {
  /** Reference of an image, or "host", the default: the host's own programs. */
  image?: string
  /** Id or name of a snapshot to start from, instead of an image. */
  snapshot?: string
  /** Unique name; default: generated. */
  name?: string
  /** Variables of all commands. */
  envs?: Record<string, string>
  /** Labels, which list can select by. */
  metadata?: Record<string, string>
  /** Working directory of commands and of relative paths, made if it is missing. */
  cwd?: string
  /** "name", "uid" or "uid:gid"; default: the image's user. */
  user?: string
  /** Time in milliseconds after which the sandbox is stopped, busy or not; default: an hour. */
  timeoutMs?: number
  /**
   * Time in milliseconds without use after which the sandbox is stopped; default: timeoutMs, or ten
   * minutes without one.
   */
  idleTimeoutMs?: number
  limits?: Limits
  /** Default: none. */
  network?: Network
  ports?: PortMapping[]
  /** Has the daemon delete the sandbox when this process ends, in whatever way. */
  tied?: boolean
  /** Further fields of the API's request. */
  request?: Omit<CreateSandbox, 'image' | 'snapshot' | 'name' | 'env' | 'labels' | 'cwd' | 'user' | 'timeout' | 'idle_timeout' | 'limits' | 'network' | 'ports'>
}

/** SandboxInfo describes a sandbox. */
export interface SandboxInfo {
  sandboxId: string
  name: string
  /** Reference of the image that it was created with. */
  templateId: string
  metadata: Record<string, string>
  state: SandboxState
  startedAt: Date
  /** Time at which it is stopped, if it has one. */
  endAt?: Date
  /** Number of cores that it may use; undefined: all. */
  cpuCount?: number
  /** Memory that it may use, in MiB; undefined: all. */
  memoryMB?: number
  cwd: string
  user: string
  /** The API's own description. */
  record: SandboxRecord
}

/** SandboxListOpts select sandboxes. */
export interface SandboxListOpts extends ConnectionOpts {
  query?: {
    /** Labels that they must have. */
    metadata?: Record<string, string>
    /** States that they must be in. Default: running and paused. */
    state?: SandboxState[]
  }
  limit?: number
}

/** ForkOpts are options of forks. */
export interface ForkOpts extends RequestOpts {
  /** Number of new sandboxes; default 1. */
  count?: number
  names?: string[]
  metadata?: Record<string, string>
  envs?: Record<string, string>
  timeoutMs?: number
}

/** SnapshotInfo describes a snapshot. */
export interface SnapshotInfo {
  snapshotId: string
  names: string[]
  /** Whether all processes were frozen while the files were read. */
  consistent: boolean
  record: Snapshot
}

function info(record: SandboxRecord): SandboxInfo {
  return {
    sandboxId: record.id, name: record.name, templateId: record.image, metadata: record.labels ?? {}, state: record.state,
    startedAt: new Date(record.started_at ?? record.created_at), ...(record.deadline && { endAt: new Date(record.deadline) }),
    ...(record.limits?.cpus && { cpuCount: record.limits.cpus }), ...(record.limits?.memory && { memoryMB: record.limits.memory / 2 ** 20 }),
    cwd: record.cwd, user: record.user, record,
  }
}

/** SandboxPaginator yields sandboxes. There is one page. */
export class SandboxPaginator implements AsyncIterable<SandboxInfo> {
  hasNext = true

  /** @internal */
  constructor(private readonly opts: SandboxListOpts) {}

  /** nextItems returns the sandboxes, oldest first. */
  async nextItems(opts: RequestOpts = {}): Promise<SandboxInfo[]> {
    if (!this.hasNext) throw new InvalidArgumentError('list: there are no more items')
    const { query = {}, limit } = this.opts
    const states = query.state ?? ['running', 'paused']
    const { sandboxes } = await new Connection(this.opts).json<SandboxList>({
      ...pick(this.opts), ...pick(opts), method: 'GET', path: ['v1', 'sandboxes'],
      query: { label: Object.entries(query.metadata ?? {}).map(([key, value]) => `${key}=${value}`) },
    })
    this.hasNext = false
    return sandboxes.filter((s) => states.includes(s.state)).slice(0, limit).map(info)
  }

  async *[Symbol.asyncIterator](): AsyncIterator<SandboxInfo> {
    if (this.hasNext) yield* await this.nextItems()
  }
}

/** Sandbox is one sandbox of a daemon. */
export class Sandbox implements AsyncDisposable {
  readonly sandboxId: string
  readonly files: Files
  readonly commands: Commands
  readonly pty: Pty
  readonly ports: Ports
  private readonly defaults: RequestOpts
  private readonly code: Code
  private tie?: IncomingMessage

  private constructor(protected readonly connection: Connection, private readonly opts: ConnectionOpts, record: SandboxRecord) {
    this.sandboxId = record.id
    // A signal of the creation is not one of the sandbox's life.
    this.defaults = opts.requestTimeoutMs === undefined ? {} : { requestTimeoutMs: opts.requestTimeoutMs }
    this.files = new Files(connection, record.id, this.defaults, record.cwd)
    this.commands = new Commands(connection, record.id, this.defaults)
    this.pty = new Pty(this.commands)
    this.ports = new Ports(connection, record.id, this.defaults)
    this.code = new Code(connection, record.id, this.defaults)
  }

  /** create makes a sandbox, of an image if one is named. It runs when this returns. */
  static create(image: string, opts?: SandboxOpts): Promise<Sandbox>
  static create(opts?: SandboxOpts): Promise<Sandbox>
  static async create(first?: string | SandboxOpts, second?: SandboxOpts): Promise<Sandbox> {
    const opts: SandboxOpts = typeof first === 'string' ? { ...second, image: first } : { ...first }
    // A lifetime is meant for a sandbox that is not used, too.
    opts.idleTimeoutMs ??= opts.timeoutMs
    const connection = new Connection(opts)
    const json: CreateSandbox = {
      ...opts.request, ...environment(opts.envs),
      ...defined({
        image: opts.image, snapshot: opts.snapshot, name: opts.name, labels: opts.metadata, cwd: opts.cwd, user: opts.user,
        limits: opts.limits, network: opts.network, ports: opts.ports, timeout: seconds('timeoutMs', opts.timeoutMs),
        idle_timeout: seconds('idleTimeoutMs', opts.idleTimeoutMs),
      }),
    }
    const request = { ...pick(opts), method: 'POST', path: ['v1', 'sandboxes'], json }
    if (!opts.tied) return new Sandbox(connection, opts, await connection.json<SandboxRecord>(request))
    const answer = await connection.open({ ...request, query: { tie: true }, accept: 'application/x-ndjson' })
    // The answer goes on until the sandbox is deleted.
    const record = await lines<SandboxRecord>(body(answer, opts.signal)).next()
    if (record.done) throw new SandboxError('create: the daemon sent no sandbox')
    const sandbox = new Sandbox(connection, opts, record.value)
    sandbox.tie = answer
    answer.on('error', () => {}) // a daemon that ends deletes nothing
    answer.socket.unref() // this process may end
    return sandbox
  }

  /**
   * connect returns a sandbox that exists, by its id or name. A paused one is resumed. timeoutMs only
   * extends its life.
   */
  static async connect(id: string, opts: ConnectionOpts & { timeoutMs?: number } = {}): Promise<Sandbox> {
    const connection = new Connection(opts)
    const record = await connection.json<SandboxRecord>({ ...pick(opts), method: 'GET', path: ['v1', 'sandboxes', id] })
    const sandbox = new Sandbox(connection, opts, record)
    if (record.state === 'paused') await sandbox.resume(pick(opts))
    if (opts.timeoutMs !== undefined && record.deadline && Date.parse(record.deadline) < Date.now() + opts.timeoutMs) {
      await sandbox.setTimeout(opts.timeoutMs, pick(opts))
    }
    return sandbox
  }

  /** list returns those that run or are paused, unless other states are asked for. */
  static list(opts: SandboxListOpts = {}): SandboxPaginator { return new SandboxPaginator(opts) }

  /** of returns a sandbox that is not looked for. */
  private static of(id: string, opts: ConnectionOpts): Sandbox {
    return new Sandbox(new Connection(opts), opts, { id, cwd: '/' } as SandboxRecord)
  }

  static kill(id: string, opts: ConnectionOpts = {}): Promise<boolean> { return Sandbox.of(id, opts).kill(pick(opts)) }
  static getInfo(id: string, opts: ConnectionOpts = {}): Promise<SandboxInfo> { return Sandbox.of(id, opts).getInfo(pick(opts)) }
  static pause(id: string, opts: ConnectionOpts = {}): Promise<boolean> { return Sandbox.of(id, opts).pause(pick(opts)) }
  static setTimeout(id: string, timeoutMs: number, opts: ConnectionOpts = {}): Promise<void> {
    return Sandbox.of(id, opts).setTimeout(timeoutMs, pick(opts))
  }

  private request(method: string, action: string[], opts: RequestOpts, json?: unknown) {
    return { ...this.defaults, ...pick(opts), method, path: ['v1', 'sandboxes', this.sandboxId, ...action], ...(json !== undefined && { json }) }
  }

  /** kill deletes the sandbox with its files, and reports whether it was there. */
  async kill(opts: RequestOpts = {}): Promise<boolean> {
    try {
      await this.connection.none(this.request('DELETE', [], opts))
      return true
    } catch (err) {
      if (err instanceof NotFoundError) return false
      throw err
    } finally {
      this.tie?.destroy()
    }
  }

  [Symbol.asyncDispose](): Promise<void> { return this.kill().then(() => {}) }

  /** getInfo describes the sandbox. */
  async getInfo(opts: RequestOpts = {}): Promise<SandboxInfo> {
    return info(await this.connection.json<SandboxRecord>(this.request('GET', [], opts)))
  }

  /**
   * isRunning reports whether the sandbox runs; one that is paused, has ended or was deleted does
   * not.
   */
  async isRunning(opts: RequestOpts = {}): Promise<boolean> {
    try {
      return (await this.getInfo(opts)).state === 'running'
    } catch (err) {
      if (err instanceof NotFoundError) return false
      throw err
    }
  }

  /**
   * setTimeout has the sandbox stop that time from now, used or not. Its files stay. A shorter idle
   * timeout is raised to it.
   */
  async setTimeout(timeoutMs: number, opts: RequestOpts = {}): Promise<void> {
    const timeout = seconds('timeoutMs', timeoutMs)
    if (!timeout) throw new InvalidArgumentError('timeoutMs 0: kill or stop the sandbox')
    const { record } = await this.getInfo(opts)
    await this.update({ timeout, ...((record.idle_timeout ?? 0) < timeout && { idle_timeout: timeout }) }, opts)
  }

  /** update changes limits, timeouts, labels and network, all or none. */
  async update(changes: UpdateSandbox, opts: RequestOpts = {}): Promise<SandboxInfo> {
    return info(await this.connection.json<SandboxRecord>(this.request('PATCH', [], opts, changes)))
  }

  /**
   * pause freezes all processes, and reports false if they were. Requests about files and commands
   * fail until the sandbox is resumed.
   */
  async pause(opts: RequestOpts = {}): Promise<boolean> {
    if ((await this.getInfo(opts)).state === 'paused') return false
    await this.connection.json(this.request('POST', ['pause'], opts))
    return true
  }

  /** resume thaws a paused sandbox. */
  async resume(opts: RequestOpts = {}): Promise<void> {
    await this.connection.json(this.request('POST', ['resume'], opts))
  }

  /** stop ends all processes and keeps the files. */
  async stop(opts: RequestOpts & { graceMs?: number } = {}): Promise<SandboxInfo> {
    const grace = seconds('graceMs', opts.graceMs)
    return info(await this.connection.json<SandboxRecord>(this.request('POST', ['stop'], opts, grace === undefined ? {} : { grace })))
  }

  /** start runs a sandbox again that was stopped, with its files. */
  async start(opts: RequestOpts & { timeoutMs?: number } = {}): Promise<SandboxInfo> {
    const timeout = seconds('timeoutMs', opts.timeoutMs)
    return info(await this.connection.json<SandboxRecord>(this.request('POST', ['start'], opts, timeout === undefined ? {} : { timeout })))
  }

  /** fork makes sandboxes with the files of this one; all or none. Processes are not copied. */
  async fork(opts: ForkOpts = {}): Promise<Sandbox[]> {
    const json = {
      ...environment(opts.envs),
      ...defined({ count: opts.count, names: opts.names, labels: opts.metadata, timeout: seconds('timeoutMs', opts.timeoutMs) }),
    }
    const { sandboxes } = await this.connection.json<SandboxForked>(this.request('POST', ['fork'], opts, json))
    return sandboxes.map((record) => new Sandbox(this.connection, this.opts, record))
  }

  /** snapshot keeps the files as they are now, for new sandboxes (option snapshot) and rollback. */
  async snapshot(opts: RequestOpts & { name?: string; metadata?: Record<string, string>; comment?: string } = {}): Promise<SnapshotInfo> {
    const json = defined({ name: opts.name, labels: opts.metadata, comment: opts.comment })
    const record = await this.connection.json<Snapshot>(this.request('POST', ['snapshots'], opts, json))
    return { snapshotId: record.id, names: record.name ? [record.name] : [], consistent: record.consistent, record }
  }

  /** createSnapshot is snapshot, by E2B's name. */
  createSnapshot(opts: Parameters<Sandbox['snapshot']>[0] = {}): Promise<SnapshotInfo> { return this.snapshot(opts) }

  /** deleteSnapshot deletes a snapshot, and reports whether it was there. */
  static async deleteSnapshot(id: string, opts: ConnectionOpts = {}): Promise<boolean> {
    try {
      await new Connection(opts).json({ ...pick(opts), method: 'DELETE', path: ['v1', 'snapshots', id] })
      return true
    } catch (err) {
      if (err instanceof NotFoundError) return false
      throw err
    }
  }

  /**
   * runCode runs code, in Python by default, and returns what it displayed and printed. Variables are
   * kept between runs, for each language or in a context, where the language has contexts. An
   * exception of the code is the error of the result. An aborted signal ends the run.
   */
  runCode(code: string, opts: RunCodeOpts = {}): Promise<Execution> { return this.code.run(code, opts) }

  /** languages returns the languages that runCode knows. The sandbox's image may lack some. */
  languages(opts: RequestOpts = {}): Promise<Language[]> { return this.code.languages(opts) }

  /** createCodeContext starts an interpreter that keeps its variables between runs. */
  createCodeContext(opts: CreateContextOpts = {}): Promise<Context> { return this.code.create(opts) }

  /** listCodeContexts returns the contexts, oldest first. */
  listCodeContexts(opts: RequestOpts = {}): Promise<Context[]> { return this.code.list(opts) }

  /** restartCodeContext starts a context anew, without its variables. */
  restartCodeContext(context: Context | string, opts: RequestOpts = {}): Promise<void> { return this.code.restart(contextId(context), opts) }

  /** interruptCodeContext interrupts the run of a context, whose variables stay. */
  interruptCodeContext(context: Context | string, opts: RequestOpts = {}): Promise<void> { return this.code.interrupt(contextId(context), opts) }

  /** removeCodeContext ends a context. */
  removeCodeContext(context: Context | string, opts: RequestOpts = {}): Promise<void> { return this.code.remove(contextId(context), opts) }

  /** rollback replaces the files by those of a snapshot. All processes end. */
  async rollback(snapshot: string, opts: RequestOpts = {}): Promise<SandboxInfo> {
    return info(await this.connection.json<SandboxRecord>(this.request('POST', ['rollback'], opts, { snapshot })))
  }
}

function contextId(context: Context | string): string { return typeof context === 'string' ? context : context.id }

/** defined drops the fields that are not set. */
function defined<T extends object>(fields: T): { [K in keyof T]?: NonNullable<T[K]> } {
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined)) as { [K in keyof T]?: NonNullable<T[K]> }
}
