import net from 'node:net'
import { once } from 'node:events'
import { Duplex, Readable } from 'node:stream'
import { body, type Connection, type RequestOpts } from './connection.js'
import { InvalidArgumentError, SandboxError } from './errors.js'
import { pick } from './commands.js'
import type { Data } from './bytes.js'

/** PortRequest is a request to an HTTP server in a sandbox. */
export interface PortRequest extends RequestOpts {
  method?: string
  headers?: Record<string, string>
  body?: Data
}

/** PortForward is a port of this host that leads to one of a sandbox. */
export class PortForward {
  readonly host: string
  readonly port: number
  private readonly open = new Set<Duplex>()

  /** @internal */
  constructor(private readonly server: net.Server, dial: () => Promise<Duplex>) {
    const { address, port } = server.address() as net.AddressInfo
    this.host = address
    this.port = port
    server.on('connection', (outside) => {
      this.join(outside, dial).catch(() => { outside.destroy() })
    })
  }

  private async join(outside: net.Socket, dial: () => Promise<Duplex>): Promise<void> {
    this.keep(outside)
    const inside = await dial()
    this.keep(inside)
    if (outside.destroyed) inside.destroy()
    // Each direction ends for itself. A broken one ends both.
    outside.pipe(inside)
    inside.pipe(outside)
    outside.once('close', () => { if (!inside.writableEnded) inside.destroy() })
    inside.once('close', () => { if (!outside.writableEnded) outside.destroy() })
  }

  private keep(conn: Duplex): void {
    this.open.add(conn)
    conn.on('error', () => { conn.destroy() })
    conn.once('close', () => this.open.delete(conn))
  }

  /** URL of an HTTP server behind the port. */
  get url(): string { return `http://${this.host.includes(':') ? `[${this.host}]` : this.host}:${this.port}` }

  /** close ends the port and its connections. */
  async close(): Promise<void> {
    if (!this.server.listening) return
    const closed = once(this.server, 'close')
    this.server.close()
    for (const conn of this.open) conn.destroy()
    await closed
  }

  [Symbol.asyncDispose](): Promise<void> { return this.close() }
}

/** Ports reaches servers that listen in a sandbox. */
export class Ports {
  /** @internal */
  constructor(private readonly connection: Connection, private readonly sandbox: string, private readonly defaults: RequestOpts) {}

  private path(port: number): string[] {
    if (!Number.isInteger(port) || port < 1 || port > 65535) throw new InvalidArgumentError(`port ${port}: must be a number from 1 to 65535`)
    return ['v1', 'sandboxes', this.sandbox, 'ports', String(port)]
  }

  /**
   * fetch sends a request to an HTTP server, through the daemon; path begins with a slash and may have
   * a query. Redirects are not followed. If no server listens, the daemon's problem document is the
   * answer.
   */
  async fetch(port: number, path: string, init: PortRequest = {}): Promise<Response> {
    if (!path.startsWith('/')) throw new InvalidArgumentError(`path ${JSON.stringify(path)}: must begin with /`)
    const method = (init.method ?? 'GET').toUpperCase()
    const answer = await this.connection.open({
      ...this.defaults, ...pick(init), method, path: this.path(port), rest: encodeURI(path).replaceAll('%25', '%'),
      ...(init.headers && { headers: init.headers }), ...(init.body !== undefined && { body: init.body }),
    }, true)
    const status = answer.statusCode ?? 0
    const headers = new Headers()
    for (let i = 0; i + 1 < answer.rawHeaders.length; i += 2) headers.append(answer.rawHeaders[i]!, answer.rawHeaders[i + 1]!)
    const empty = method === 'HEAD' || status === 204 || status === 205 || status === 304
    if (empty) answer.resume()
    const content = empty ? null : Readable.toWeb(Readable.from(body(answer, init.signal), { objectMode: false })) as ReadableStream<Uint8Array>
    try {
      return new Response(content as ConstructorParameters<typeof Response>[0], { status, statusText: answer.statusMessage ?? '', headers })
    } catch (err) { // a status that no Response has
      answer.destroy()
      throw new SandboxError(`port ${port} of the sandbox: ${(err as Error).message}`, { cause: err })
    }
  }

  /** connect returns a connection to a server. Each direction ends for itself. */
  async connect(port: number, opts: RequestOpts = {}): Promise<Duplex> {
    const { socket, head } = await this.connection.upgrade({ ...this.defaults, ...pick(opts), method: 'POST', path: this.path(port) }, 'tcp')
    if (head.length) socket.unshift(head)
    return socket
  }

  /**
   * forward listens on a port of this host, one that is free unless localPort is set, and passes
   * connections on to one of the sandbox. Every user of the host can connect to it.
   */
  async forward(port: number, opts: { localPort?: number; localHost?: string } = {}): Promise<PortForward> {
    this.path(port)
    const server = net.createServer({ allowHalfOpen: true })
    server.listen(opts.localPort ?? 0, opts.localHost ?? '127.0.0.1')
    await once(server, 'listening')
    return new PortForward(server, () => this.connect(port))
  }
}
