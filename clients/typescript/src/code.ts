import type { Artifact, CodeEvent, CodeFailure, CodeRequest, CodeValue, Context as ContextRecord, ContextList, Language, LanguageList, Sandbox } from './api.js'
import { Output } from './bytes.js'
import { environment, pick, seconds } from './commands.js'
import type { Connection, RequestOpts } from './connection.js'
import { ConnectionError, InvalidArgumentError, NotFoundError, SandboxError, TimeoutError, problemError } from './errors.js'

/** codeTimeoutMs is the default timeout of a run of code, as in E2B's SDK. */
const codeTimeoutMs = 60_000

/**
 * OutputMessage is a piece of what code prints. It ends at a whole character, not at a line's end.
 */
export class OutputMessage {
  constructor(
    readonly line: string,
    /** Time in nanoseconds since 1970. */
    readonly timestamp: number,
    /** Whether it was printed to stderr. */
    readonly error: boolean,
  ) {}

  toString(): string { return this.line }
}

/** ExecutionError is an exception that ended code, or the message of a compiler. */
export class ExecutionError {
  constructor(readonly name: string, readonly value: string, readonly traceback: string) {}
}

/** Chart is a chart as data. */
export interface Chart {
  type: 'line' | 'scatter' | 'bar' | 'pie' | 'box_and_whisker' | 'superchart' | 'unknown' | (string & {})
  title?: string
  elements: unknown[]
  x_label?: string
  y_label?: string
  x_unit?: string
  y_unit?: string
  [more: string]: unknown
}

const forms = ['text', 'html', 'markdown', 'svg', 'png', 'jpeg', 'pdf', 'latex', 'json', 'javascript', 'data', 'chart'] as const

/** Result is one value that code displayed, in the forms that its type has. */
export class Result {
  /** Whether it is the value of the last expression; others were displayed on the way. */
  readonly isMainResult: boolean
  declare readonly text?: string
  declare readonly html?: string
  declare readonly markdown?: string
  declare readonly svg?: string
  /** In base64, as jpeg and pdf are. */
  declare readonly png?: string
  declare readonly jpeg?: string
  declare readonly pdf?: string
  declare readonly latex?: string
  declare readonly json?: unknown
  declare readonly javascript?: string
  /** Table: its columns and their values. */
  declare readonly data?: Record<string, unknown>
  declare readonly chart?: Chart
  /** Forms of other media types, by type. */
  readonly extra: Record<string, unknown>

  /** @internal */
  constructor(readonly raw: CodeValue) {
    this.isMainResult = raw.is_main_result ?? false
    this.extra = (raw.extra ?? {}) as Record<string, unknown>
    for (const form of forms) if (raw[form] !== undefined) Object.assign(this, { [form]: raw[form] })
    Object.defineProperty(this, 'raw', { enumerable: false })
  }

  /** formats returns the names of the forms that there are. */
  formats(): string[] {
    return [...forms.filter((form) => this[form] !== undefined), ...Object.keys(this.extra)]
  }
}

/** Execution is the outcome of a run of code. */
export class Execution {
  readonly results: Result[] = []
  readonly logs: { stdout: string[]; stderr: string[] } = { stdout: [], stderr: [] }
  /** Exception that ended the code. */
  declare error?: ExecutionError
  /** Number of the run in its context, from 1 on. */
  declare executionCount?: number
  /** Files that the code wrote into `output_dir` of its request. */
  readonly artifacts: Artifact[] = []
  /** Exit code; of a context 1 after an exception. */
  declare exitCode?: number

  /** Text of the value of the last expression. */
  get text(): string | undefined {
    return this.results.find((r) => r.isMainResult)?.text
  }

  toJSON(): object { return { ...this, text: this.text } }
}

/** Context is an interpreter that keeps variables between runs. */
export interface Context {
  id: string
  language: string
  cwd: string
}

/** RunCodeOpts are options of a run of code. */
export interface RunCodeOpts extends RequestOpts {
  /** Name or alias of a language; default python. Not with context. */
  language?: string
  /**
   * Context whose variables the code sees and changes; default: one of the sandbox for each
   * language.
   */
  context?: Context | string
  /** Runs the code in a process of its own, whose variables no other run sees. */
  stateless?: boolean
  onStdout?: (output: OutputMessage) => unknown
  onStderr?: (output: OutputMessage) => unknown
  onResult?: (result: Result) => unknown
  onError?: (error: ExecutionError) => unknown
  envs?: Record<string, string>
  /** Time in milliseconds after which the run is ended; 0 means none. Default 60,000. */
  timeoutMs?: number
  /** Packages that are installed before, if they are missing. */
  libraries?: string[]
  /** Further fields of the API's request. */
  request?: Omit<CodeRequest, 'code' | 'language' | 'context' | 'env' | 'timeout' | 'libraries'>
}

/** Code runs code in a sandbox. */
export class Code {
  private known?: Promise<Language[]>
  private readonly contexts = new Map<string, Promise<string>>() // of runs that name none, by language

  /** @internal */
  constructor(private readonly connection: Connection, private readonly sandbox: string, private readonly defaults: RequestOpts) {}

  private request(method: string, path: string[], opts: RequestOpts, json?: unknown) {
    return { ...this.defaults, ...pick(opts), method, path: ['v1', 'sandboxes', this.sandbox, ...path], ...(json !== undefined && { json }) }
  }

  async languages(opts: RequestOpts): Promise<Language[]> {
    const { languages } = await this.connection.json<LanguageList>({ ...this.defaults, ...pick(opts), method: 'GET', path: ['v1', 'languages'] })
    return languages
  }

  private async language(name: string): Promise<Language> {
    const wanted = name.toLowerCase()
    this.known ??= this.languages({})
    let languages: Language[]
    try {
      languages = await this.known
    } catch (err) {
      delete this.known // the next call asks again
      throw err
    }
    const found = languages.find((l) => l.name === wanted || l.aliases?.includes(wanted))
    if (!found) throw new InvalidArgumentError(`language ${JSON.stringify(name)}: there is ${languages.map((l) => l.name).join(', ')}`)
    return found
  }

  /**
   * shared returns the context of runs that name none. A label of the sandbox holds its id, so that
   * every client of the sandbox has the same variables.
   */
  private shared(language: string): Promise<string> {
    let id = this.contexts.get(language)
    if (!id) {
      id = this.findShared(language)
      this.contexts.set(language, id)
      id.catch(() => { this.contexts.delete(language) })
    }
    return id
  }

  private async findShared(language: string): Promise<string> {
    const label = `sandboxd.client.context.${language}`
    const { labels } = await this.connection.json<Sandbox>(this.request('GET', [], {}))
    const noted = labels?.[label]
    if (noted && (await this.list({})).some((c) => c.id === noted)) return noted
    const { id } = await this.create({ language })
    await this.connection.json(this.request('PATCH', [], {}, { labels: { [label]: id } }))
    return id
  }

  async run(code: string, opts: RunCodeOpts): Promise<Execution> {
    const timeoutMs = opts.timeoutMs ?? codeTimeoutMs
    const timeout = seconds('timeoutMs', timeoutMs)
    const json: CodeRequest = {
      ...opts.request, code, ...environment(opts.envs), ...(timeout && { timeout }), ...(opts.libraries?.length && { libraries: opts.libraries }),
    }
    if (opts.context !== undefined) {
      if (opts.language !== undefined || opts.stateless) throw new InvalidArgumentError('context: goes with neither language nor stateless')
      json.context = typeof opts.context === 'string' ? opts.context : opts.context.id
      return this.stream(json, opts, timeoutMs)
    }
    const language = opts.stateless ? undefined : await this.language(opts.language ?? 'python')
    if (!language?.contexts) {
      json.language = opts.language ?? 'python'
      return this.stream(json, opts, timeoutMs)
    }
    const context = await this.shared(language.name)
    try {
      return await this.stream({ ...json, context }, opts, timeoutMs)
    } catch (err) {
      if (!(err instanceof NotFoundError)) throw err
      // Another client has deleted it, or the sandbox.
      this.contexts.delete(language.name)
      return this.stream({ ...json, context: await this.shared(language.name) }, opts, timeoutMs)
    }
  }

  private async stream(json: CodeRequest, opts: RunCodeOpts, timeoutMs: number): Promise<Execution> {
    const run = new Execution()
    const print = (stream: 'stdout' | 'stderr', on?: (output: OutputMessage) => unknown) => {
      const output = new Output()
      return async (event: CodeEvent | undefined) => {
        const line = event ? output.push(event.data ? Buffer.from(event.data, 'base64') : Buffer.from(event.text ?? '', 'utf8')) : output.end()
        if (line === '') return
        run.logs[stream].push(line)
        await on?.(new OutputMessage(line, Math.round((event?.time ? Date.parse(event.time) : Date.now()) * 1e6), stream === 'stderr'))
      }
    }
    const stdout = print('stdout', opts.onStdout)
    const stderr = print('stderr', opts.onStderr)
    for await (const event of this.connection.stream<CodeEvent>(this.request('POST', ['code'], opts, json))) {
      opts.signal?.throwIfAborted() // a callback can take long
      if (event.problem) throw problemError(event.problem)
      if (event.execution_count) run.executionCount = event.execution_count
      switch (event.type) {
        case 'started':
          break
        case 'stdout':
          await stdout(event)
          break
        case 'stderr':
          await stderr(event)
          break
        case 'result': {
          const result = new Result(event.result ?? {})
          run.results.push(result)
          await opts.onResult?.(result)
          break
        }
        case 'error': {
          run.error = failure(event.failure)
          await opts.onError?.(run.error)
          break
        }
        case 'end':
          await stdout(undefined)
          await stderr(undefined)
          run.artifacts.push(...event.artifacts ?? [])
          run.exitCode = event.exit?.code ?? 0
          if (event.exit?.timeout) throw new TimeoutError(`the code was ended at its timeout of ${timeoutMs} ms`, { result: run })
          return run
        default:
          throw new SandboxError(`the daemon sent an event of the unknown type ${JSON.stringify(event.type)}`)
      }
    }
    throw new ConnectionError('the daemon ended the stream without the end of the code')
  }

  async create(opts: CreateContextOpts): Promise<Context> {
    const idle = seconds('idleTimeoutMs', opts.idleTimeoutMs)
    const json = {
      ...environment(opts.envs), ...(opts.language !== undefined && { language: opts.language }), ...(opts.cwd !== undefined && { cwd: opts.cwd }),
      ...(opts.user !== undefined && { user: opts.user }), ...(opts.memory !== undefined && { memory: opts.memory }), ...(idle && { idle_timeout: idle }),
      ...(opts.preload !== undefined && { preload: opts.preload }),
    }
    return context(await this.connection.json<ContextRecord>(this.request('POST', ['contexts'], opts, json)))
  }

  async list(opts: RequestOpts): Promise<Context[]> {
    return (await this.connection.json<ContextList>(this.request('GET', ['contexts'], opts))).contexts.map(context)
  }

  async restart(id: string, opts: RequestOpts): Promise<void> {
    await this.connection.json(this.request('POST', ['contexts', id, 'restart'], opts))
  }

  async interrupt(id: string, opts: RequestOpts): Promise<void> {
    await this.connection.json(this.request('POST', ['contexts', id, 'interrupt'], opts))
  }

  async remove(id: string, opts: RequestOpts): Promise<void> {
    await this.connection.none(this.request('DELETE', ['contexts', id], opts))
  }
}

/** CreateContextOpts are options of a new context. */
export interface CreateContextOpts extends RequestOpts {
  /** Default: python. */
  language?: string
  cwd?: string
  user?: string
  envs?: Record<string, string>
  /** Modules that Python imports first. The sandbox then keeps another interpreter ready, for the next context like this one. */
  preload?: string[]
  /** Bytes of the address space of its process. */
  memory?: number
  /** Time in milliseconds without a run after which it is deleted; default: none. */
  idleTimeoutMs?: number
}

function context(record: ContextRecord): Context {
  return { id: record.id, language: record.language, cwd: record.cwd }
}

function failure(f: CodeFailure | undefined): ExecutionError {
  return new ExecutionError(f?.name ?? '', f?.value ?? '', f?.traceback ?? '')
}
