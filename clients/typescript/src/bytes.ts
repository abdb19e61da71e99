import { SandboxError } from './errors.js'

/** Data is content that a caller gives: whole, or as it comes. */
export type Data = string | Uint8Array | ArrayBuffer | Blob | ReadableStream<Uint8Array | string> |
  AsyncIterable<Uint8Array | string>

/** whole returns data of a known length as bytes, and undefined for data that comes in pieces. */
export async function whole(data: Data): Promise<Uint8Array | undefined> {
  if (typeof data === 'string') return Buffer.from(data, 'utf8')
  if (data instanceof Uint8Array) return data
  if (data instanceof ArrayBuffer) return new Uint8Array(data)
  if (data instanceof Blob) return new Uint8Array(await data.arrayBuffer())
  return undefined
}

/**
 * ByteReader takes pieces of exact lengths from a stream of chunks. Only one take may be pending.
 */
export class ByteReader {
  private readonly source: AsyncIterator<Uint8Array>
  private chunks: Uint8Array[] = []
  private length = 0

  constructor(source: AsyncIterable<Uint8Array>, first?: Uint8Array) {
    this.source = source[Symbol.asyncIterator]()
    if (first?.length) this.push(first)
  }

  private push(chunk: Uint8Array): void {
    this.chunks.push(chunk)
    this.length += chunk.length
  }

  /**
   * drain reads to the end of the stream, which is near. A connection serves the next request, and
   * lets this process end, only then.
   */
  async drain(): Promise<void> {
    try {
      while (!(await this.source.next()).done);
    } catch { /* all that matters was read */ }
  }

  /** take returns the next n bytes, or undefined if the stream ends before the first of them. */
  async take(n: number): Promise<Uint8Array | undefined> {
    while (this.length < n) {
      const { value, done } = await this.source.next()
      if (done) {
        if (this.length === 0) return undefined
        throw new SandboxError(`the stream ended after ${this.length} of ${n} bytes`)
      }
      this.push(value)
    }
    const parts: Uint8Array[] = []
    let missing = n
    while (missing > 0) {
      const chunk = this.chunks[0]!
      if (chunk.length <= missing) {
        parts.push(chunk)
        this.chunks.shift()
        missing -= chunk.length
      } else {
        parts.push(chunk.subarray(0, missing))
        this.chunks[0] = chunk.subarray(missing)
        missing = 0
      }
    }
    this.length -= n
    return parts.length === 1 ? parts[0]! : Buffer.concat(parts, n)
  }
}

/** maxLine bounds a line of a stream, in bytes: the result of a code run has 16 MiB, in JSON up to six times that. */
const maxLine = 128 << 20

/** lines yields the values of a stream of JSON lines. */
export async function* lines<T>(source: AsyncIterable<Uint8Array>): AsyncGenerator<T> {
  let rest: Uint8Array[] = [] // the beginning of a line whose end has not come
  let length = 0
  for await (let chunk of source) {
    for (let end = chunk.indexOf(10); end >= 0; end = chunk.indexOf(10)) {
      rest.push(chunk.subarray(0, end))
      const line = Buffer.concat(rest).toString('utf8')
      rest = []
      length = 0
      chunk = chunk.subarray(end + 1)
      if (line !== '') yield parse<T>(line)
    }
    if (chunk.length > 0) rest.push(chunk)
    if ((length += chunk.length) > maxLine) throw new SandboxError('the daemon sent a line that is too long')
  }
  if (length > 0) throw new SandboxError('the stream ended within a line')
}

/** parse decodes JSON of the daemon. */
export function parse<T>(text: string): T {
  try {
    return JSON.parse(text) as T
  } catch (err) {
    throw new SandboxError(`decode the daemon's answer: ${(err as Error).message}`, { cause: err })
  }
}

/**
 * Output collects what a program writes to one stream. Bytes are kept as they are; the text of a
 * piece ends at a whole character.
 */
export class Output {
  private readonly chunks: Uint8Array[] = []
  private readonly decoder = new TextDecoder('utf-8', { ignoreBOM: true })

  /** push keeps a piece and returns the characters that it completes. */
  push(piece: Uint8Array): string {
    this.chunks.push(piece)
    return this.decoder.decode(piece, { stream: true })
  }

  /** end returns a replacement for a character that was never completed, or "". */
  end(): string {
    return this.decoder.decode()
  }

  get bytes(): Uint8Array {
    const all = Buffer.concat(this.chunks)
    return new Uint8Array(all.buffer, all.byteOffset, all.length)
  }

  /** text is the whole output; invalid UTF-8 is replaced. */
  get text(): string {
    return Buffer.concat(this.chunks).toString('utf8')
  }
}
