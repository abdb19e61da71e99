import { closeSync, constants, lstatSync, openSync } from 'node:fs'
import http, { type IncomingMessage } from 'node:http'
import https from 'node:https'
import net from 'node:net'
import { homedir } from 'node:os'
import path from 'node:path'
import type { Duplex, Readable } from 'node:stream'
import { lines, parse, whole, type Data } from './bytes.js'
import {
  ConnectionError, InvalidArgumentError, SandboxError, TimeoutError, UnavailableError, isProblem, problemError,
} from './errors.js'

/** RequestOpts are options of every request. */
export interface RequestOpts {
  /** Ends the request, whose promise is then rejected with the signal's reason. */
  signal?: AbortSignal
  /** Time in milliseconds until the answer begins; default: no limit. */
  requestTimeoutMs?: number
}

/** ConnectionOpts say where the daemon is. */
export interface ConnectionOpts extends RequestOpts {
  /**
   * Path of the daemon's Unix socket. Default: the environment variable SANDBOXD_SOCKET, else the
   * socket of the user's own daemon.
   */
  socket?: string
  /** URL of something that passes requests on to the socket, such as http://127.0.0.1:9000. */
  url?: string
  /** Headers that are added to each request, for such a thing. */
  headers?: Record<string, string>
}

const maxAnswer = 32 << 20 // bytes of a JSON answer, far above the daemon's own bound
const maxProblem = 256 << 10
/**
 * A free connection is closed after this time, long before the daemon does: a request would
 * otherwise meet its end.
 */
const idleMs = 30_000

/** continueMs is the time after which an upload begins without the daemon's word. */
const continueMs = 10_000

/** Request is one request to the daemon. */
export interface Request extends RequestOpts {
  method: string
  /** Segments, which are escaped here. */
  path: string[]
  /** Further characters of the path, as they are. */
  rest?: string
  query?: Record<string, string | number | boolean | Uint8Array | string[] | undefined>
  json?: unknown
  body?: Data
  type?: string
  accept?: string
  headers?: Record<string, string>
}

/** NotRunningError reports that no daemon listens. */
export class NotRunningError extends UnavailableError {}

/**
 * defaultSocket returns the path on which the user's own daemon listens, by the rule of the Go
 * client.
 */
export function defaultSocket(): string {
  const { SANDBOXD_SOCKET, XDG_RUNTIME_DIR, XDG_DATA_HOME, HOME } = process.env
  if (SANDBOXD_SOCKET) return SANDBOXD_SOCKET
  const uid = process.getuid?.() ?? -1
  if (uid === 0) return '/run/sandboxd/api.sock'
  for (const dir of [XDG_RUNTIME_DIR, `/run/user/${uid}`]) {
    if (!dir || !path.isAbsolute(dir)) continue
    try {
      const stat = lstatSync(dir)
      if (stat.isDirectory() && stat.uid === uid) return path.join(dir, 'sandboxd', 'api.sock')
    } catch { /* the next one */ }
  }
  const data = XDG_DATA_HOME && path.isAbsolute(XDG_DATA_HOME) ? XDG_DATA_HOME : path.join(HOME ?? homedir(), '.local', 'share')
  return path.join(data, 'sandboxd', 'run', 'api.sock')
}

/**
 * dial connects to a Unix socket. A path longer than the 107 bytes of sockaddr_un is reached
 * through a descriptor of its directory.
 */
function dial(socket: string): net.Socket {
  if (Buffer.byteLength(socket) <= 107) return net.connect({ path: socket })
  const oPath = 0x200000 // a user that may connect need not be able to read the directory
  let dir: number
  try {
    dir = openSync(path.dirname(socket), constants.O_DIRECTORY | oPath)
  } catch (err) {
    const failed = new net.Socket()
    process.nextTick(() => failed.destroy(err as Error))
    return failed
  }
  const conn = net.connect({ path: `/proc/self/fd/${dir}/${path.basename(socket)}` })
  const close = () => { closeSync(dir) }
  conn.once('connect', () => { conn.off('error', close); close() })
  conn.once('error', close)
  return conn
}

/** Connection sends requests to one daemon. */
export class Connection {
  private readonly agent: http.Agent
  private readonly base: { protocol: string; hostname: string; port?: number; prefix: string }
  private readonly headers: Record<string, string>
  private readonly name: string

  constructor(opts: ConnectionOpts = {}) {
    this.headers = { ...opts.headers }
    if (opts.url !== undefined) {
      if (opts.socket !== undefined) throw new InvalidArgumentError('socket and url: only one of them')
      let url: URL
      try {
        url = new URL(opts.url)
      } catch (err) {
        throw new InvalidArgumentError(`url ${JSON.stringify(opts.url)}: ${(err as Error).message}`, { cause: err })
      }
      if (url.protocol !== 'http:' && url.protocol !== 'https:') throw new InvalidArgumentError(`url ${opts.url}: neither http nor https`)
      if (url.search || url.hash || url.username) throw new InvalidArgumentError(`url ${opts.url}: takes no user, query or fragment`)
      this.base = {
        protocol: url.protocol, hostname: url.hostname.replace(/^\[(.*)\]$/, '$1'), prefix: url.pathname.replace(/\/$/, ''),
        ...(url.port && { port: Number(url.port) }),
      }
      this.name = opts.url
      this.agent = new (url.protocol === 'https:' ? https : http).Agent({ keepAlive: true, timeout: idleMs })
      return
    }
    const socket = opts.socket ?? defaultSocket()
    this.name = socket
    this.base = { protocol: 'http:', hostname: 'sandboxd', prefix: '' } // a name that is never looked up
    this.agent = new http.Agent({ keepAlive: true, timeout: idleMs })
    Object.assign(this.agent, { createConnection: () => dial(socket) })
  }

  /** url returns the path and query of a request. */
  private target(r: Request): string {
    let url = this.base.prefix
    for (const segment of r.path) {
      // The URL's cleaning would make these another route.
      if (segment === '' || segment === '.' || segment === '..') {
        throw new InvalidArgumentError(`${JSON.stringify(segment)} is not an id or name`)
      }
      url += '/' + escape(segment)
    }
    url += r.rest ?? ''
    let separator = '?'
    for (const [name, value] of Object.entries(r.query ?? {})) {
      if (value === undefined) continue
      for (const one of Array.isArray(value) ? value : [value]) {
        url += `${separator}${name}=${one instanceof Uint8Array ? escapeBytes(one) : escape(String(one))}`
        separator = '&'
      }
    }
    return url
  }

  private prepare(r: Request, more: Record<string, string>): http.RequestOptions {
    const headers: Record<string, string> = { ...this.headers, ...r.headers, ...more }
    if (r.accept) headers['accept'] = r.accept
    return {
      agent: this.agent, method: r.method, path: this.target(r), headers, protocol: this.base.protocol,
      hostname: this.base.hostname, ...(this.base.port && { port: this.base.port }),
    }
  }

  private request(options: http.RequestOptions): http.ClientRequest {
    try {
      return (this.base.protocol === 'https:' ? https : http).request(options)
    } catch (err) { // such as a header that HTTP does not have
      throw new InvalidArgumentError(`${options.method} ${options.path}: ${(err as Error).message}`, { cause: err })
    }
  }

  /**
   * open sends a request and returns an answer with a status of success; every other one is an
   * error. The signal ends the answer, too.
   */
  async open(r: Request, any = false): Promise<IncomingMessage> {
    r.signal?.throwIfAborted()
    const more: Record<string, string> = {}
    let body: Uint8Array | undefined
    let pieces: AsyncIterable<Uint8Array | string> | undefined
    if (r.json !== undefined) {
      body = Buffer.from(JSON.stringify(r.json), 'utf8')
      more['content-type'] = 'application/json'
    } else if (r.body !== undefined) {
      body = await whole(r.body)
      if (body) {
        // As below, where it is worth a round trip.
        if (body.length > 64 << 10) [pieces, body] = [one(body), body]
      } else {
        pieces = r.body as AsyncIterable<Uint8Array | string>
      }
      if (r.type) more['content-type'] = r.type
    }
    if (body) more['content-length'] = String(body.length)
    // The daemon can refuse an upload before it is sent. Its answer would otherwise race with a
    // broken
    // pipe here.
    if (pieces) more['expect'] = '100-continue'
    const options = this.prepare(r, more)

    const answer = await this.retried(r, options, (req, fail) => {
      if (!pieces) {
        req.end(body)
        return
      }
      const source = pieces
      let begun = false
      const begin = () => {
        clearTimeout(timer)
        if (begun) return
        begun = true
        pump(req, source).catch(fail)
      }
      const timer = setTimeout(begin, continueMs) // there are proxies that never say it
      req.once('continue', begin)
      req.once('response', () => { begun = true; clearTimeout(timer) })
      req.once('close', () => { begun = true; clearTimeout(timer) })
      req.flushHeaders()
    })
    if (any) return answer
    const status = answer.statusCode ?? 0
    if (status < 200 || status > 299) throw await this.failure(r, answer)
    if (r.accept && mediaType(answer) !== r.accept && status !== 204) throw await this.unexpected(r, answer)
    return answer
  }

  /**
   * retried sends a request, once more if the daemon closed a kept connection before it: only one
   * that changes nothing.
   */
  private async retried(
    r: Request, options: http.RequestOptions, send: (req: http.ClientRequest, fail: (err: unknown) => void) => void,
  ): Promise<IncomingMessage> {
    for (;;) {
      const req = this.request(options)
      try {
        return (await this.response(r, req, send)).answer
      } catch (err) {
        const code = err instanceof ConnectionError ? (err.cause as NodeJS.ErrnoException | undefined)?.code : undefined
        if (r.method === 'GET' && req.reusedSocket && (code === 'ECONNRESET' || code === 'EPIPE')) continue
        throw err
      }
    }
  }

  /** response sends a request and returns the beginning of its answer. */
  private response(
    r: Request, req: http.ClientRequest, send: (req: http.ClientRequest, fail: (err: unknown) => void) => void,
  ): Promise<{ answer: IncomingMessage; socket?: Duplex; head?: Buffer }> {
    return new Promise((resolve, reject) => {
      let timer: NodeJS.Timeout | undefined
      let answer: IncomingMessage | undefined
      let closed = false
      const abort = () => {
        const reason = r.signal!.reason as Error
        reject(reason)
        if (answer) answer.destroy(asError(reason))
        req.destroy(asError(reason))
      }
      const settle = () => {
        clearTimeout(timer)
      }
      const done = () => {
        closed = true
        r.signal?.removeEventListener('abort', abort)
      }
      r.signal?.addEventListener('abort', abort, { once: true })
      if (r.requestTimeoutMs) {
        timer = setTimeout(() => {
          const late = new TimeoutError(`${r.method} ${req.path}: no answer within ${r.requestTimeoutMs} ms`)
          reject(late)
          req.destroy(late)
        }, r.requestTimeoutMs)
      }
      req.on('error', (err) => { // also after the answer has begun, which then has an error, too
        settle()
        done()
        reject(this.transportError(r, err))
      })
      req.once('response', (res) => {
        settle()
        answer = res
        res.once('close', () => {
          done()
          // The answer to an upload may come before its end.
          if (!req.writableFinished) req.destroy()
        })
        resolve({ answer: res })
      })
      req.once('upgrade', (res, socket, head) => {
        settle()
        if (closed) return
        socket.once('close', done)
        answer = undefined
        r.signal?.removeEventListener('abort', abort)
        resolve({ answer: res, socket, head })
      })
      send(req, (err) => {
        reject(err)
        req.destroy(asError(err))
      })
    })
  }

  /** upgrade sends a request whose answer is a connection of another protocol. */
  async upgrade(r: Request, protocol: string): Promise<{ socket: Duplex; head: Buffer; answer: IncomingMessage }> {
    r.signal?.throwIfAborted()
    const options = this.prepare(r, { connection: 'Upgrade', upgrade: protocol })
    const { answer, socket, head } = await this.response(r, this.request(options), (req) => req.end())
    if (socket && head) return { socket, head, answer }
    throw await this.failure(r, answer)
  }

  /** json sends a request and returns its decoded answer. */
  async json<T>(r: Request): Promise<T> {
    const answer = await this.open({ ...r, accept: 'application/json' })
    return parse<T>((await read(answer, maxAnswer)).toString('utf8'))
  }

  /** none sends a request whose answer has no content. */
  async none(r: Request): Promise<void> {
    await read(await this.open(r), maxAnswer) // so that the connection can serve the next request
  }

  /** stream sends a request and yields the lines of its answer. */
  async *stream<T>(r: Request): AsyncGenerator<T> {
    const answer = await this.open({ ...r, accept: 'application/x-ndjson' })
    try {
      yield* lines<T>(body(answer, r.signal))
    } finally {
      answer.destroy()
    }
  }

  /** failure returns the error of an answer that is no success. */
  private async failure(r: Request, answer: IncomingMessage): Promise<Error> {
    if (mediaType(answer) !== 'application/problem+json') return this.unexpected(r, answer)
    const problem = parse<unknown>((await read(answer, maxProblem)).toString('utf8'))
    return isProblem(problem) ? problemError(problem) : new SandboxError(`${r.method} ${this.target(r)}: status ${answer.statusCode}`)
  }

  private async unexpected(r: Request, answer: IncomingMessage): Promise<Error> {
    let start = ''
    for await (const chunk of answer) {
      start = (chunk as Buffer).subarray(0, 200).toString('utf8')
      break
    }
    answer.destroy()
    return new SandboxError(`${r.method} ${this.target(r)}: unexpected answer ${answer.statusCode} of type ` +
      `${JSON.stringify(answer.headers['content-type'] ?? '')}, beginning ${JSON.stringify(start)}; does another server listen there?`)
  }

  private transportError(r: Request, err: NodeJS.ErrnoException): Error {
    if (err instanceof SandboxError) return err
    switch (err.code) {
      case 'ENOENT':
      case 'ENOTDIR':
      case 'ECONNREFUSED':
        return new NotRunningError(`no daemon is running at ${this.name}; start one with: sandboxd serve (or name another ` +
          'socket with SANDBOXD_SOCKET or the option socket)', { cause: err })
      case 'EACCES':
        return new SandboxError(`connect to ${this.name}: permission denied; the socket belongs to another user's daemon`, { cause: err })
    }
    return new ConnectionError(`${r.method} ${this.target(r)} at ${this.name}: ${err.message}`, { cause: err })
  }
}

function asError(reason: unknown): Error {
  return reason instanceof Error ? reason : new Error(String(reason))
}

async function* one(data: Uint8Array): AsyncGenerator<Uint8Array> {
  yield data
}

/** pump sends pieces as fast as they are taken. */
async function pump(req: http.ClientRequest, source: AsyncIterable<Uint8Array | string>): Promise<void> {
  for await (const piece of source) {
    if (req.destroyed) return
    if (!req.write(piece)) {
      await new Promise<void>((resolve) => {
        const go = () => { req.off('drain', go); req.off('close', go); resolve() }
        req.on('drain', go)
        req.on('close', go)
      })
    }
  }
  if (!req.destroyed) req.end()
}

/** body yields the content of an answer. An answer that breaks off is a ConnectionError. */
export async function* body(answer: Readable, signal?: AbortSignal): AsyncGenerator<Uint8Array> {
  try {
    for await (const chunk of answer) yield chunk as Buffer
  } catch (err) {
    signal?.throwIfAborted()
    const { code, message } = err as NodeJS.ErrnoException
    if (code === 'ECONNRESET' || code === 'ERR_STREAM_PREMATURE_CLOSE') {
      throw new ConnectionError(`the connection to the daemon broke: ${message}`, { cause: err })
    }
    throw err
  }
}

/** read returns the content of an answer of at most limit bytes. */
export async function read(answer: IncomingMessage, limit: number): Promise<Buffer> {
  const chunks: Uint8Array[] = []
  let length = 0
  for await (const chunk of body(answer)) {
    if ((length += chunk.length) > limit) {
      answer.destroy()
      throw new SandboxError(`the answer exceeds ${limit} bytes`)
    }
    chunks.push(chunk)
  }
  return Buffer.concat(chunks, length)
}

function mediaType(answer: IncomingMessage): string {
  return (answer.headers['content-type'] ?? '').split(';', 1)[0]!.trim().toLowerCase()
}

function escape(text: string): string {
  try {
    return encodeURIComponent(text)
  } catch (err) { // half of a surrogate pair, which no UTF-8 has
    throw new InvalidArgumentError(`${JSON.stringify(text)}: ${(err as Error).message}`, { cause: err })
  }
}

function escapeBytes(bytes: Uint8Array): string {
  let out = ''
  for (const byte of bytes) out += '%' + byte.toString(16).padStart(2, '0')
  return out
}
