import { Readable } from 'node:stream'
import type { FileChange, FileEntry, ListEvent } from './api.js'
import { type Data } from './bytes.js'
import { body, read, type Connection, type Request, type RequestOpts } from './connection.js'
import { AlreadyExistsError, InvalidArgumentError, NotFoundError, SandboxError, problemError } from './errors.js'
import { pick } from './commands.js'

/**
 * FilePath is a path in a sandbox: absolute, or relative to the sandbox's working directory. A path
 * that is no UTF-8 is given as bytes.
 */
export type FilePath = string | Uint8Array

/** FileType is the type of a file. */
export const FileType = {
  FILE: 'file', DIR: 'dir', SYMLINK: 'symlink', FIFO: 'fifo', SOCKET: 'socket', BLOCK: 'block', CHAR: 'char',
} as const
export type FileType = (typeof FileType)[keyof typeof FileType]

/** WriteInfo names a file. */
export interface WriteInfo {
  name: string
  path: string
  type: FileType
}

/** EntryInfo describes a file. The sandbox controls all of it: sanitise names before printing. */
export interface EntryInfo extends WriteInfo {
  /** Exact path, if it is no UTF-8. */
  pathBytes?: Uint8Array
  size: number
  /** Permissions as a number, with setuid, setgid and sticky. */
  mode: number
  /** Permissions as ls(1) shows them. */
  permissions: string
  owner: string
  group: string
  uid: number
  gid: number
  modifiedTime: Date
  /** Target of a symlink, unresolved. */
  symlinkTarget?: string
  /** Reason why a list lacks the content of this directory. */
  error?: string
}

/** FilesystemEventType is the type of a change. */
export const FilesystemEventType = {
  CREATE: 'create', WRITE: 'write', REMOVE: 'remove', RENAME: 'rename', CHMOD: 'chmod',
  /** Changes at or below the path were missed: list it again. */
  OVERFLOW: 'overflow',
} as const
export type FilesystemEventType = (typeof FilesystemEventType)[keyof typeof FilesystemEventType]

/** FilesystemEvent is a change of a watched file or directory. */
export interface FilesystemEvent {
  type: FilesystemEventType
  /** Path relative to what is watched; of a rename the new one. */
  name: string
  path: string
  /** Earlier path of a rename. */
  from?: string
}

/** WriteOpts are options of a write. */
export interface WriteOpts extends RequestOpts {
  /** Owner; default: the sandbox's user. */
  user?: string
  /** Permissions of a new file; default 0o644. */
  mode?: number
  /** Writes to the end of the file. What was written before an error stays. */
  append?: boolean
}

/**
 * IncompleteListError reports a list that lacks entries: they are too many, too deep or too long.
 */
export class IncompleteListError extends SandboxError {
  constructor(message: string, readonly entries: EntryInfo[]) { super(message) }
}

/** WatchHandle is a running watch. */
export class WatchHandle {
  /** @internal */
  constructor(private readonly end: () => void, private readonly ended: Promise<void>) {}

  /** stop ends the watch. No callback is called after it has returned. */
  async stop(): Promise<void> {
    this.end()
    await this.ended
  }
}

const types: Record<FileEntry['type'], FileType> = {
  file: 'file', directory: 'dir', symlink: 'symlink', fifo: 'fifo', socket: 'socket', block: 'block', char: 'char',
}

const changes: Record<Exclude<FileChange['kind'], 'ready' | undefined>, FilesystemEventType> = {
  created: 'create', modified: 'write', attributes: 'chmod', deleted: 'remove', moved: 'rename', overflow: 'overflow',
}

/** Files reads and changes the files of a sandbox. */
export class Files {
  /** @internal */
  constructor(
    private readonly connection: Connection, private readonly sandbox: string, private readonly defaults: RequestOpts,
    private readonly cwd: string,
  ) {}

  /** absolute returns a path as the API takes it: a string, or bytes. */
  private absolute(path: FilePath): FilePath {
    if (path.length === 0) throw new InvalidArgumentError('path: is empty')
    if (typeof path !== 'string') return path[0] === 0x2f ? path : Buffer.concat([Buffer.from(this.cwd.replace(/\/?$/, '/')), path])
    if (path.startsWith('/')) return path
    // Not normalized: with a link in it, ".." is another directory.
    return this.cwd.replace(/\/?$/, '/') + path.replace(/^(\.\/+)+/, '')
  }

  private request(method: string, route: string, opts: RequestOpts, more: Partial<Request>): Request {
    return { ...this.defaults, ...pick(opts), ...more, method, path: ['v1', 'sandboxes', this.sandbox, route] }
  }

  /** there reports an error if the sandbox itself is not there. */
  private async there(opts: RequestOpts): Promise<void> {
    await this.connection.json({ ...this.defaults, ...pick(opts), method: 'GET', path: ['v1', 'sandboxes', this.sandbox] })
  }

  /** read returns the content of a file: text, in which invalid UTF-8 is replaced, or bytes. */
  read(path: FilePath, opts?: RequestOpts & { format?: 'text' }): Promise<string>
  read(path: FilePath, opts: RequestOpts & { format: 'bytes' }): Promise<Uint8Array>
  read(path: FilePath, opts: RequestOpts & { format: 'blob' }): Promise<Blob>
  read(path: FilePath, opts: RequestOpts & { format: 'stream' }): Promise<ReadableStream<Uint8Array>>
  async read(
    path: FilePath, opts: RequestOpts & { format?: 'text' | 'bytes' | 'blob' | 'stream' } = {},
  ): Promise<string | Uint8Array | Blob | ReadableStream<Uint8Array>> {
    const answer = await this.connection.open(this.request('GET', 'files', opts, { query: { path: this.absolute(path) }, accept: 'application/octet-stream' }))
    // The iterator turns a connection that breaks into an error of ours.
    if (opts.format === 'stream') return Readable.toWeb(Readable.from(body(answer, opts.signal), { objectMode: false })) as ReadableStream<Uint8Array>
    const content = await read(answer, Number.MAX_SAFE_INTEGER)
    switch (opts.format) {
      case 'bytes': return new Uint8Array(content.buffer, content.byteOffset, content.length)
      case 'blob': return new Blob([content as Uint8Array<ArrayBuffer>])
      default: return content.toString('utf8')
    }
  }

  /**
   * write makes a file, and missing directories above it, or replaces one. The file appears whole or
   * not at all. Several are written one after another; the first error ends it.
   */
  write(path: FilePath, data: Data, opts?: WriteOpts): Promise<WriteInfo>
  write(files: Array<{ path: FilePath; data: Data }>, opts?: WriteOpts): Promise<WriteInfo[]>
  async write(
    target: FilePath | Array<{ path: FilePath; data: Data }>, second?: Data | WriteOpts, third?: WriteOpts,
  ): Promise<WriteInfo | WriteInfo[]> {
    if (typeof target === 'string' || target instanceof Uint8Array) {
      if (second === undefined) throw new InvalidArgumentError('write: there is no data')
      return this.writeOne(target, second as Data, third ?? {})
    }
    const written: WriteInfo[] = []
    for (const { path, data } of target) written.push(await this.writeOne(path, data, (second as WriteOpts | undefined) ?? {}))
    return written
  }

  private async writeOne(path: FilePath, data: Data, opts: WriteOpts): Promise<WriteInfo> {
    const full = this.absolute(path)
    await this.connection.none(this.request('PUT', 'files', opts, {
      query: { path: full, mode: opts.mode?.toString(8).padStart(4, '0'), user: opts.user, append: opts.append },
      body: data, type: 'application/octet-stream',
    }))
    const name = typeof full === 'string' ? full : Buffer.from(full).toString('utf8')
    return { name: name.slice(name.lastIndexOf('/') + 1), path: name, type: 'file' }
  }

  /** list returns the entries below a directory, sorted by path; depth is the number of levels. */
  async list(path: FilePath, opts: RequestOpts & { depth?: number } = {}): Promise<EntryInfo[]> {
    const entries: EntryInfo[] = []
    const lines = this.connection.stream<ListEvent>(this.request('GET', 'list', opts, { query: { path: this.absolute(path), depth: opts.depth } }))
    for await (const line of lines) {
      if (line.entry) entries.push(info(line.entry))
      if (line.error) throw problemError(line.error)
      if (!line.done) continue
      entries.sort((a, b) => Buffer.compare(Buffer.from(a.path), Buffer.from(b.path)))
      if (line.more) throw new IncompleteListError(`list: entries are missing after ${entries.length}`, entries)
      return entries
    }
    throw new SandboxError('list: the daemon ended the answer before its end')
  }

  /** getInfo describes a file. A link is described itself, unless follow is set. */
  async getInfo(path: FilePath, opts: RequestOpts & { follow?: boolean } = {}): Promise<EntryInfo> {
    return info(await this.connection.json<FileEntry>(this.request('GET', 'stat', opts, { query: { path: this.absolute(path), follow: opts.follow } })))
  }

  /** exists reports whether there is a file, also a link that leads nowhere. */
  async exists(path: FilePath, opts: RequestOpts = {}): Promise<boolean> {
    try {
      await this.getInfo(path, opts)
      return true
    } catch (err) {
      if (!(err instanceof NotFoundError)) throw err
      await this.there(opts)
      return false
    }
  }

  /** makeDir makes a directory and those above it, and reports false if it was there. */
  async makeDir(path: FilePath, opts: RequestOpts & { mode?: number; user?: string } = {}): Promise<boolean> {
    const full = this.absolute(path)
    const mkdir = (parents: boolean) => this.connection.none(this.request('POST', 'mkdir', opts, {
      json: {
        ...field('path', full), parents, ...(opts.mode !== undefined && { mode: opts.mode.toString(8).padStart(4, '0') }),
        ...(opts.user !== undefined && { user: opts.user }),
      },
    }))
    try {
      await mkdir(false)
      return true
    } catch (err) {
      if (err instanceof AlreadyExistsError) {
        if ((await this.getInfo(full, { ...opts, follow: true })).type === 'dir') return false
        throw err
      }
      if (!(err instanceof NotFoundError)) throw err
    }
    await mkdir(true)
    return true
  }

  /** rename gives a file or directory another path, within one file system. */
  async rename(from: FilePath, to: FilePath, opts: RequestOpts & { overwrite?: boolean } = {}): Promise<EntryInfo> {
    const target = this.absolute(to)
    await this.connection.none(this.request('POST', 'move', opts, {
      json: { ...field('from', this.absolute(from)), ...field('to', target), ...(opts.overwrite && { overwrite: true }) },
    }))
    return this.getInfo(target, pick(opts))
  }

  /** remove deletes a file or a directory with all that it has. A missing one is no error. */
  async remove(path: FilePath, opts: RequestOpts = {}): Promise<void> {
    try {
      await this.connection.none(this.request('DELETE', 'files', opts, { query: { path: this.absolute(path), recursive: true } }))
    } catch (err) {
      if (!(err instanceof NotFoundError)) throw err
      await this.there(opts)
    }
  }

  /**
   * watchDir calls onEvent for changes of a file or directory. It returns when later changes are
   * reported. onExit is called when the watch ends, with the reason unless it was stopped.
   */
  async watchDir(
    path: FilePath, onEvent: (event: FilesystemEvent) => unknown,
    opts: RequestOpts & { recursive?: boolean; onExit?: (err?: Error) => unknown } = {},
  ): Promise<WatchHandle> {
    const full = this.absolute(path)
    const stop = new AbortController()
    const request = this.request('GET', 'watch', opts, { query: { path: full, recursive: opts.recursive } })
    const signal = request.signal ? AbortSignal.any([request.signal, stop.signal]) : stop.signal
    const lines = this.connection.stream<FileChange>({ ...request, signal })
    const first = await lines.next()
    if (!first.done && first.value.error) throw problemError(first.value.error)
    if (first.done || first.value.kind !== 'ready') throw new SandboxError('watch: the daemon sent no beginning')
    const base = typeof full === 'string' ? full : Buffer.from(full).toString('utf8')
    const follow = async () => {
      let reason: Error | undefined
      try {
        for await (const change of lines) {
          if (change.error) throw problemError(change.error)
          if (stop.signal.aborted) break
          if (change.kind && change.kind !== 'ready') await onEvent(event(base, change, changes[change.kind]))
        }
      } catch (err) {
        if (!stop.signal.aborted) reason = err as Error
      }
      if (opts.onExit) await opts.onExit(reason)
    }
    const ended = follow()
    ended.catch(() => {}) // an onExit that throws
    return new WatchHandle(() => { stop.abort() }, ended)
  }
}

function field(name: string, path: FilePath): Record<string, string> {
  return typeof path === 'string' ? { [name]: path } : { [name + '_bytes']: Buffer.from(path).toString('base64') }
}

function event(base: string, change: FileChange, type: FilesystemEventType): FilesystemEvent {
  const path = change.to ?? change.path ?? base
  const root = base.replace(/\/*$/, '/')
  return { type, path, name: path.startsWith(root) ? path.slice(root.length) : path, ...(change.from && { from: change.from }) }
}

/** info returns an entry in the form of this package. */
function info(e: FileEntry): EntryInfo {
  const mode = parseInt(e.mode, 8)
  return {
    name: e.path.slice(e.path.lastIndexOf('/') + 1), path: e.path, type: types[e.type], size: e.size, mode,
    permissions: permissions(e.type, mode), owner: e.user ?? String(e.uid), group: e.group ?? String(e.gid), uid: e.uid, gid: e.gid,
    modifiedTime: new Date(e.mtime), ...(e.path_bytes && { pathBytes: new Uint8Array(Buffer.from(e.path_bytes, 'base64')) }),
    ...(e.target !== undefined && { symlinkTarget: e.target }), ...(e.error && { error: e.error }),
  }
}

/** permissions returns a mode as ls(1) shows it. */
function permissions(type: FileEntry['type'], mode: number): string {
  const letter = { file: '-', directory: 'd', symlink: 'l', fifo: 'p', socket: 's', block: 'b', char: 'c' }[type]
  let out = ''
  for (const [shift, special, set, unset] of [[6, 0o4000, 's', 'S'], [3, 0o2000, 's', 'S'], [0, 0o1000, 't', 'T']] as const) {
    const bits = mode >> shift
    const x = bits & 1
    out += (bits & 4 ? 'r' : '-') + (bits & 2 ? 'w' : '-') + (mode & special ? (x ? set : unset) : x ? 'x' : '-')
  }
  return letter + out
}
