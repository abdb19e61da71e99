import type { Exec, ExecEvent, ExecList, ExecRequest, Exit, Usage } from './api.js'
import { ByteReader, Output, parse, whole, type Data } from './bytes.js'
import { body, type Connection, type RequestOpts } from './connection.js'
import { ConnectionError, InvalidArgumentError, NotFoundError, ProgramNotFoundError, SandboxError, TimeoutError, problemError } from './errors.js'
import { WebSocket } from './websocket.js'

/** foregroundTimeoutMs is the default timeout of a command that is waited for, as in E2B's SDK. */
const foregroundTimeoutMs = 60_000

/** Callback takes a piece of output. The next one waits for its promise. */
type Callback<T> = (data: T) => unknown

/** CommandOpts are options of a command. */
export interface CommandOpts extends RequestOpts {
  /** Runs the command without this client, and returns a handle of it. */
  background?: boolean
  /** Working directory; default: the sandbox's. */
  cwd?: string
  /** "name", "uid" or "uid:gid"; default: the sandbox's user. */
  user?: string
  /** Variables that are added to the sandbox's. */
  envs?: Record<string, string>
  /** Gets stdout as text, which ends at whole characters. */
  onStdout?: Callback<string>
  /** Gets stderr as text, which ends at whole characters. */
  onStderr?: Callback<string>
  /**
   * Whole input of the command, or true to keep the stdin of a background command open for sendStdin.
   * Default: none.
   */
  stdin?: boolean | string | Uint8Array
  /**
   * Time in milliseconds after which all processes of the command are killed; 0 means none. Default:
   * 60,000, and none for background commands.
   */
  timeoutMs?: number
  /** Program that gets a command line as its last argument. Default: bash -c, else sh -c. */
  shell?: string[]
  /** Resource limits of each process, in the units of setrlimit(2). */
  rlimits?: Record<string, number>
}

/** ConnectOpts are options of a connection to a background command. */
export interface ConnectOpts extends RequestOpts {
  onStdout?: Callback<string>
  onStderr?: Callback<string>
  /** Offset in the output, all streams together. Default: all that is kept, from the start on. */
  from?: 'start' | 'end' | number
}

/** CommandInfo is a running command. */
export interface CommandInfo {
  /** Process id inside the sandbox. */
  pid: number
  /** Id of the exec, which is unique, while a pid may be used again. */
  execId: string
  cmd: string
  args: string[]
  cwd: string
  user?: string
  tty: boolean
  /** Whether it runs without a client, so that connect can follow it. */
  background: boolean
  startedAt: Date
}

/** CommandResult says how a command ended. */
export class CommandResult {
  /** Exit code; 128+n after signal n. */
  readonly exitCode: number
  /** Name of the signal that ended it, such as SIGKILL. */
  declare readonly signal?: string
  /** Whether it was killed at its timeout. */
  readonly timedOut: boolean
  /** Whether the out-of-memory killer acted in the sandbox meanwhile. */
  readonly oom: boolean
  declare readonly usage?: Usage
  /** Number of bytes of output that were missed, of a connection that began too late. */
  readonly dropped: number

  /** @internal */
  constructor(exit: Exit, usage: Usage | undefined, private readonly out: Streams) {
    this.exitCode = exit.code
    if (exit.signal) this.signal = exit.signal
    this.timedOut = exit.timeout ?? false
    this.oom = exit.oom ?? false
    if (usage) this.usage = usage
    this.dropped = out.dropped
    Object.defineProperty(this, 'out', { enumerable: false })
  }

  /** Stdout as text; invalid UTF-8 is replaced. */
  get stdout(): string { return this.out.stdout.text }
  /** Stderr as text; invalid UTF-8 is replaced. */
  get stderr(): string { return this.out.stderr.text }
  get stdoutBytes(): Uint8Array { return this.out.stdout.bytes }
  get stderrBytes(): Uint8Array { return this.out.stderr.bytes }

  /** Reason of a command that a signal ended. */
  get error(): string | undefined {
    if (this.timedOut) return 'timeout'
    return this.signal && `signal: ${this.signal}`
  }

  toJSON(): object {
    return { ...this, stdout: this.stdout, stderr: this.stderr, error: this.error }
  }
}

/** CommandExitError reports a command that ended with another exit code than 0. */
export class CommandExitError extends SandboxError {
  /** @internal */
  constructor(readonly result: CommandResult) {
    super(`exit code ${result.exitCode}${result.error ? ` (${result.error})` : ''}${lastLine(result.stderr)}`)
  }

  get exitCode(): number { return this.result.exitCode }
  get stdout(): string { return this.result.stdout }
  get stderr(): string { return this.result.stderr }
  get error(): string | undefined { return this.result.error }
}

function lastLine(text: string): string {
  const line = text.trimEnd().split('\n').at(-1) ?? ''
  return line && `: ${line.slice(0, 200)}`
}

const outOfBand = { stdout: 1, stderr: 2, event: 3 } as const

/** Streams is the output of a command and its callbacks. */
class Streams {
  readonly stdout = new Output()
  readonly stderr = new Output()
  dropped = 0
  length = 0

  constructor(
    private readonly onStdout?: Callback<string>, private readonly onStderr?: Callback<string>,
    private readonly onBytes?: Callback<Uint8Array>,
  ) {}

  async push(channel: number, piece: Uint8Array): Promise<void> {
    const [output, on] = channel === outOfBand.stdout ? [this.stdout, this.onStdout] : [this.stderr, this.onStderr]
    this.length += piece.length
    if (this.onBytes) await this.onBytes(piece) // a terminal's, which is not kept
    else {
      const text = output.push(piece)
      if (text && on) await on(text)
    }
  }

  async end(): Promise<void> {
    const [out, err] = [this.stdout.end(), this.stderr.end()]
    if (out && this.onStdout) await this.onStdout(out)
    if (err && this.onStderr) await this.onStderr(err)
  }
}

/** outcome returns the result of a command, or throws its error. */
function outcome(result: CommandResult, timeoutMs: number | undefined): CommandResult {
  if (result.timedOut) {
    throw new TimeoutError(`the command was killed at its timeout${timeoutMs ? ` of ${timeoutMs} ms` : ''}`, { result })
  }
  if (result.exitCode !== 0) throw new CommandExitError(result)
  return result
}

/** CommandHandle is a background command or a terminal. Its output is read until its end. */
export class CommandHandle {
  readonly pid: number
  readonly execId: string
  private result?: CommandResult
  private readonly ended: Promise<CommandResult>
  private disconnected = false

  /** @internal */
  constructor(
    private readonly commands: Commands, exec: { pid: number; exec: string }, private readonly socket: WebSocket,
    private readonly streams: Streams, messages: AsyncGenerator<ExecEvent | { channel: number; piece: Uint8Array }>,
    private readonly timeoutMs?: number,
  ) {
    this.pid = exec.pid
    this.execId = exec.exec
    this.ended = this.follow(messages)
    this.ended.catch(() => {}) // for those that wait, if any
  }

  private async follow(messages: AsyncGenerator<ExecEvent | { channel: number; piece: Uint8Array }>): Promise<CommandResult> {
    try {
      for await (const m of messages) {
        if (this.disconnected) break
        if ('channel' in m) {
          await this.streams.push(m.channel, m.piece)
          continue
        }
        if (m.dropped) this.streams.dropped += m.dropped
        if (m.error) throw problemError(m.error)
        if (m.exit) {
          await this.streams.end()
          return this.result = new CommandResult(m.exit, m.usage, this.streams)
        }
      }
    } catch (err) {
      if (!this.disconnected) throw err
    } finally {
      this.commands.forget(this.execId)
      this.socket.close()
    }
    if (this.disconnected) throw new SandboxError(`command ${this.execId}: disconnected; it goes on`)
    throw new ConnectionError(`command ${this.execId}: the daemon ended the stream without its exit; connect to it again`)
  }

  /** Exit code, or undefined while the command runs. */
  get exitCode(): number | undefined { return this.result?.exitCode }
  /** Stdout until now. */
  get stdout(): string { return this.streams.stdout.text }
  /** Stderr until now. */
  get stderr(): string { return this.streams.stderr.text }
  get error(): string | undefined { return this.result?.error }
  /** Number of bytes of output that have been read here. */
  get received(): number { return this.streams.length }

  /**
   * wait returns when the command has ended. An exit code other than 0 is a CommandExitError, an end
   * at the timeout a TimeoutError. The signal ends the waiting only.
   */
  async wait(opts: RequestOpts = {}): Promise<CommandResult> {
    return outcome(await interrupted(this.ended, opts.signal), this.timeoutMs)
  }

  /** kill sends SIGKILL to all processes of the command, and reports whether it ran. */
  async kill(opts: RequestOpts = {}): Promise<boolean> {
    if (this.result) return false
    return this.commands.kill(this.execId, opts)
  }

  /** sendSignal sends a signal, such as SIGINT, to the process group of the command. */
  sendSignal(signal: string, opts: RequestOpts = {}): Promise<void> {
    return this.commands.sendSignal(this.execId, signal, opts)
  }

  /**
   * sendStdin writes to the command's stdin, in the order of the calls, and returns when that is
   * taken.
   */
  sendStdin(data: Data, opts: RequestOpts = {}): Promise<void> {
    return this.commands.sendStdin(this.execId, data, opts)
  }

  /** closeStdin ends the command's input. */
  closeStdin(opts: RequestOpts = {}): Promise<void> {
    return this.commands.closeStdin(this.execId, opts)
  }

  /** disconnect stops following the command, which goes on. */
  async disconnect(): Promise<void> {
    this.disconnected = true
    this.socket.close()
    await this.ended.catch(() => {})
  }
}

/** interrupted returns the outcome of a promise, unless the signal is first. */
async function interrupted<T>(promise: Promise<T>, signal: AbortSignal | undefined): Promise<T> {
  if (!signal) return promise
  signal.throwIfAborted()
  let abort!: () => void
  const aborted = new Promise<never>((_, reject) => {
    abort = () => { reject(signal.reason as Error) }
    signal.addEventListener('abort', abort, { once: true })
  })
  try {
    return await Promise.race([promise, aborted])
  } finally {
    signal.removeEventListener('abort', abort)
  }
}

/** environment returns variables in the form of the API. */
export function environment(envs: Record<string, string> | undefined): { env?: string[] } {
  if (!envs) return {}
  return {
    env: Object.entries(envs).map(([name, value]) => {
      if (name === '' || name.includes('=')) throw new InvalidArgumentError(`envs: ${JSON.stringify(name)} is no name of a variable`)
      return `${name}=${value}`
    }),
  }
}

/** seconds returns a time in the unit of the API. */
export function seconds(name: string, ms: number | undefined): number | undefined {
  if (ms === undefined) return undefined
  if (!Number.isFinite(ms) || ms < 0) throw new InvalidArgumentError(`${name} ${ms}: must be a number of milliseconds`)
  return ms / 1000
}

/** Commands runs commands in a sandbox. */
export class Commands {
  private readonly execs = new Map<number, string>() // of handles whose commands run, by pid
  private readonly writes = new Map<string, Promise<unknown>>() // latest write to each stdin
  private shell = ['bash', '-c']

  /** @internal */
  constructor(private readonly connection: Connection, private readonly sandbox: string, private readonly defaults: RequestOpts) {}

  /**
   * run executes a command line by a shell, or a program with its arguments without one. It returns
   * at the end of the command; an exit code other than 0 is a CommandExitError. An aborted signal
   * kills the command with all that it started.
   */
  run(cmd: string | string[], opts: CommandOpts & { background: true }): Promise<CommandHandle>
  run(cmd: string | string[], opts?: CommandOpts & { background?: false }): Promise<CommandResult>
  run(cmd: string | string[], opts?: CommandOpts): Promise<CommandResult | CommandHandle>
  async run(cmd: string | string[], opts: CommandOpts = {}): Promise<CommandResult | CommandHandle> {
    const request = async (argv: string[]): Promise<CommandResult | CommandHandle> => {
      const timeoutMs = opts.timeoutMs ?? (opts.background ? 0 : foregroundTimeoutMs)
      const { timeoutMs: _, ...rest } = opts
      const r = this.request(argv, { ...rest, timeoutMs })
      const streams = new Streams(opts.onStdout, opts.onStderr)
      if (opts.background) return this.start(r, streams, opts, timeoutMs)
      if (opts.stdin === true) throw new InvalidArgumentError('stdin: true is for background commands')
      return this.foreground(r, streams, opts, timeoutMs)
    }
    if (typeof cmd !== 'string') return request(cmd)
    if (opts.shell) return request([...opts.shell, cmd])
    const { shell } = this
    try {
      return await request([...shell, cmd])
    } catch (err) {
      if (!(err instanceof ProgramNotFoundError) || shell[0] === 'sh') throw err
      this.shell = ['sh', '-c'] // an image without bash; nothing has run
      return request([...this.shell, cmd])
    }
  }

  private request(argv: string[], opts: CommandOpts): ExecRequest {
    const { stdin } = opts
    const timeout = seconds('timeoutMs', opts.timeoutMs)
    return {
      argv, ...environment(opts.envs), ...(opts.cwd !== undefined && { cwd: opts.cwd }), ...(opts.user !== undefined && { user: opts.user }),
      ...(stdin === true && { stdin_open: true }), ...(opts.rlimits && { rlimits: opts.rlimits }), ...(timeout && { timeout }),
      ...((typeof stdin === 'string' || stdin instanceof Uint8Array) && { stdin: Buffer.from(stdin as string).toString('base64') }),
    }
  }

  private path(...more: string[]): string[] {
    return ['v1', 'sandboxes', this.sandbox, ...more]
  }

  private async foreground(json: ExecRequest, streams: Streams, opts: CommandOpts, timeoutMs: number): Promise<CommandResult> {
    const o = { ...this.defaults, ...pick(opts) }
    const answer = await this.connection.open({ ...o, method: 'POST', path: this.path('exec'), json, accept: 'application/vnd.sandboxd.stream' })
    try {
      const reader = new ByteReader(body(answer, o.signal))
      for (;;) {
        const head = await reader.take(5)
        if (!head) throw new ConnectionError('the daemon ended the stream without the exit of the command')
        const length = Buffer.from(head).readUInt32BE(1)
        if (length > 1 << 20) throw new SandboxError(`the daemon sent a frame of ${length} bytes`)
        const payload = length > 0 ? await reader.take(length) : new Uint8Array()
        if (!payload) throw new ConnectionError('the daemon ended the stream within a frame')
        switch (head[0]) {
          case outOfBand.stdout:
          case outOfBand.stderr:
            await streams.push(head[0], payload)
            o.signal?.throwIfAborted() // a callback can take long
            break
          case outOfBand.event: {
            const event = parse<ExecEvent>(Buffer.from(payload).toString('utf8'))
            if (event.error) throw problemError(event.error)
            if (!event.exit) break
            await streams.end()
            void reader.drain()
            return outcome(new CommandResult(event.exit, event.usage, streams), timeoutMs)
          }
          default:
            throw new SandboxError(`the daemon sent a frame of channel ${head[0]}`)
        }
      }
    } catch (err) {
      answer.destroy() // which kills the command, if it runs
      throw err
    }
  }

  /**
   * start runs a program without this client. It is attached to before it begins, so that nothing of
   * its output is missed.
   * @internal
   */
  async start(json: ExecRequest, streams: Streams, opts: RequestOpts, timeoutMs?: number): Promise<CommandHandle> {
    const o = { ...this.defaults, ...pick(opts) }
    const { id } = await this.connection.json<Exec>({ ...o, method: 'POST', path: this.path('execs'), json })
    try {
      const socket = await WebSocket.open(this.connection, { ...o, path: this.path('execs', id, 'attach'), query: { from: 'next', hold: true } })
      try {
        await this.connection.json<Exec>({ ...o, method: 'POST', path: this.path('execs', id, 'start') })
        return await this.handle(socket, streams, timeoutMs)
      } catch (err) {
        socket.close()
        throw err
      }
    } catch (err) {
      // Killed, if it has begun. Its sandbox may be gone, and the first error is the one that
      // matters.
      await this.connection.none({ method: 'DELETE', path: this.path('execs', id) }).catch(() => {})
      throw err
    }
  }

  private async handle(socket: WebSocket, streams: Streams, timeoutMs?: number): Promise<CommandHandle> {
    const messages = decode(socket)
    const first = await messages.next()
    if (first.done || 'channel' in first.value) throw new SandboxError('the daemon sent output before the beginning')
    const { pid, exec, error, dropped } = first.value
    if (error) throw problemError(error)
    if (pid === undefined || !exec) throw new SandboxError('the daemon sent no pid of the command')
    if (dropped) streams.dropped += dropped
    this.execs.set(pid, exec)
    return new CommandHandle(this, { pid, exec }, socket, streams, messages, timeoutMs)
  }

  /** @internal */
  forget(exec: string): void {
    for (const [pid, id] of this.execs) if (id === exec) this.execs.delete(pid)
    this.writes.delete(exec)
  }

  /** list returns the running commands and terminals, oldest first. */
  async list(opts: RequestOpts = {}): Promise<CommandInfo[]> {
    const { execs } = await this.connection.json<ExecList>({ ...this.defaults, ...pick(opts), method: 'GET', path: this.path('execs') })
    return execs.filter((x) => x.state === 'running').map((x) => ({
      pid: x.pid, execId: x.id, cmd: x.argv[0] ?? '', args: x.argv.slice(1), cwd: x.cwd, ...(x.user && { user: x.user }), tty: x.tty ?? false,
      background: x.detached ?? false, startedAt: new Date(x.started_at),
    }))
  }

  /** connect follows a background command, by its pid or the id of its exec. */
  async connect(command: number | string, opts: ConnectOpts = {}): Promise<CommandHandle> {
    return this.attach(command, new Streams(opts.onStdout, opts.onStderr), opts)
  }

  /** @internal */
  async attach(command: number | string, streams: Streams, opts: ConnectOpts): Promise<CommandHandle> {
    const o = { ...this.defaults, ...pick(opts) }
    const id = await this.execOf(command, o)
    const query = { from: opts.from ?? 'start', hold: true }
    const socket = await WebSocket.open(this.connection, { ...o, path: this.path('execs', id, 'attach'), query })
    try {
      return await this.handle(socket, streams)
    } catch (err) {
      socket.close()
      throw err
    }
  }

  /** execOf returns the id of the exec of a running command. */
  private async execOf(command: number | string, opts: RequestOpts): Promise<string> {
    if (typeof command === 'string') return command
    const known = this.execs.get(command)
    if (known) return known
    const found = (await this.list(opts)).find((c) => c.pid === command)
    if (!found) throw new NotFoundError(`no command with pid ${command} runs in the sandbox`)
    return found.execId
  }

  /** kill sends SIGKILL to all processes of a command, and reports whether it ran. */
  async kill(command: number | string, opts: RequestOpts = {}): Promise<boolean> {
    const o = { ...this.defaults, ...pick(opts) }
    try {
      const id = await this.execOf(command, o)
      const { state } = await this.connection.json<Exec>({ ...o, method: 'GET', path: this.path('execs', id) })
      if (state !== 'running') return false
      await this.connection.none({ ...o, method: 'POST', path: this.path('execs', id, 'signal'), json: { signal: 'SIGKILL', all: true } })
      return true
    } catch (err) {
      if (err instanceof NotFoundError) return false
      throw err
    }
  }

  /** sendSignal sends a signal, such as SIGINT, to the process group of a command. */
  async sendSignal(command: number | string, signal: string, opts: RequestOpts = {}): Promise<void> {
    const o = { ...this.defaults, ...pick(opts) }
    const id = await this.execOf(command, o)
    await this.connection.none({ ...o, method: 'POST', path: this.path('execs', id, 'signal'), json: { signal } })
  }

  /**
   * sendStdin writes to the stdin of a command, in the order of the calls, and returns when that is
   * taken.
   */
  sendStdin(command: number | string, data: Data, opts: RequestOpts = {}): Promise<void> {
    return this.write(command, data, false, opts)
  }

  /** closeStdin ends the input of a command. */
  closeStdin(command: number | string, opts: RequestOpts = {}): Promise<void> {
    return this.write(command, new Uint8Array(), true, opts)
  }

  private async write(command: number | string, data: Data, close: boolean, opts: RequestOpts): Promise<void> {
    const o = { ...this.defaults, ...pick(opts) }
    const known = typeof command === 'string' ? command : this.execs.get(command)
    const id = known ?? await this.execOf(command, o)
    const before = this.writes.get(id)
    const written = (async () => {
      await before?.catch(() => {})
      const content = await whole(data) ?? data
      await this.connection.none({
        ...o, method: 'POST', path: this.path('execs', id, 'stdin'), body: content, type: 'application/octet-stream', ...(close && { query: { close } }),
      })
    })()
    this.writes.set(id, written)
    try {
      await written
    } finally {
      if (this.writes.get(id) === written) this.writes.delete(id)
    }
  }

  /** resize sets the size of a terminal. @internal */
  async resize(command: number | string, size: { rows: number; cols: number }, opts: RequestOpts): Promise<void> {
    const o = { ...this.defaults, ...pick(opts) }
    const id = await this.execOf(command, o)
    await this.connection.none({ ...o, method: 'POST', path: this.path('execs', id, 'resize'), json: { rows: size.rows, cols: size.cols } })
  }
}

/** decode yields the messages of an attached client. */
async function* decode(socket: WebSocket): AsyncGenerator<ExecEvent | { channel: number; piece: Uint8Array }> {
  for await (const m of socket.messages()) {
    if (m.text !== undefined) {
      yield parse<ExecEvent>(m.text)
      continue
    }
    const channel = m.data[0]
    if (channel !== outOfBand.stdout && channel !== outOfBand.stderr) throw new SandboxError(`the daemon sent a frame of channel ${channel}`)
    yield { channel, piece: m.data.subarray(1) }
  }
}

/** pick returns the options that every request has. */
export function pick(opts: RequestOpts): RequestOpts {
  return {
    ...(opts.signal && { signal: opts.signal }), ...(opts.requestTimeoutMs !== undefined && { requestTimeoutMs: opts.requestTimeoutMs }),
  }
}

/** PtyOpts are options of a terminal. */
export interface PtyOpts extends RequestOpts {
  rows?: number
  cols?: number
  /** Gets what the terminal shows, as bytes. The next piece waits for its promise. */
  onData?: Callback<Uint8Array>
  /** Program and its arguments. Default: bash -i -l, else sh -i. */
  cmd?: string[]
  cwd?: string
  user?: string
  envs?: Record<string, string>
  /** Time in milliseconds after which its processes are killed; default: none. */
  timeoutMs?: number
}

/** Pty runs programs on terminals. */
export class Pty {
  /** @internal */
  constructor(private readonly commands: Commands) {}

  /** create starts a shell, or another program, on a terminal of its own. */
  async create(opts: PtyOpts = {}): Promise<CommandHandle> {
    const start = (argv: string[]) => {
      const timeout = seconds('timeoutMs', opts.timeoutMs)
      return this.commands.start({
        argv, tty: true, rows: opts.rows ?? 24, cols: opts.cols ?? 80,
        ...environment({ TERM: 'xterm-256color', LANG: 'C.UTF-8', LC_ALL: 'C.UTF-8', ...opts.envs }),
        ...(opts.cwd !== undefined && { cwd: opts.cwd }), ...(opts.user !== undefined && { user: opts.user }), ...(timeout && { timeout }),
      }, new Streams(undefined, undefined, opts.onData ?? (() => {})), opts, opts.timeoutMs)
    }
    if (opts.cmd) return start(opts.cmd)
    try {
      return await start(['bash', '-i', '-l'])
    } catch (err) {
      if (!(err instanceof ProgramNotFoundError)) throw err
      return start(['sh', '-i'])
    }
  }

  /** connect follows a terminal, by its pid or the id of its exec. */
  connect(terminal: number | string, opts: Omit<ConnectOpts, 'onStdout' | 'onStderr'> & { onData?: Callback<Uint8Array> } = {}): Promise<CommandHandle> {
    return this.commands.attach(terminal, new Streams(undefined, undefined, opts.onData ?? (() => {})), opts)
  }

  /** sendInput types into a terminal. */
  sendInput(terminal: number | string, data: string | Uint8Array, opts: RequestOpts = {}): Promise<void> {
    return this.commands.sendStdin(terminal, data, opts)
  }

  /** resize sets the size of a terminal. */
  resize(terminal: number | string, size: { rows: number; cols: number }, opts: RequestOpts = {}): Promise<void> {
    return this.commands.resize(terminal, size, opts)
  }

  /** kill sends SIGKILL to all processes of a terminal, and reports whether it ran. */
  kill(terminal: number | string, opts: RequestOpts = {}): Promise<boolean> {
    return this.commands.kill(terminal, opts)
  }
}
