import { createHash, randomBytes } from 'node:crypto'
import type { Duplex } from 'node:stream'
import { ByteReader } from './bytes.js'
import { body, type Connection, type Request } from './connection.js'
import { ConnectionError, SandboxError } from './errors.js'

/** Message is one message of a WebSocket. */
export type Message = { text: string; data?: never } | { data: Uint8Array; text?: never }

const maxMessage = 4 << 20 // the daemon's messages are far shorter
const enum Op { Continuation = 0, Text = 1, Binary = 2, Close = 8, Ping = 9, Pong = 10 }

/**
 * WebSocket is the client's end of a WebSocket (RFC 6455) over any connection to the daemon. Node's
 * own, from version 22 on, knows no Unix sockets and has no backpressure.
 */
export class WebSocket {
  private closing = false

  private constructor(private readonly socket: Duplex, private readonly head: Buffer) {
    socket.on('error', () => {}) // the reader sees it, too
  }

  static async open(connection: Connection, r: Omit<Request, 'method'>): Promise<WebSocket> {
    const key = randomBytes(16).toString('base64')
    const headers = { 'sec-websocket-version': '13', 'sec-websocket-key': key }
    const { socket, head, answer } = await connection.upgrade({ ...r, method: 'GET', headers }, 'websocket')
    const want = createHash('sha1').update(key + '258EAFA5-E914-47DA-95CA-C5AB0DC85B11').digest('base64')
    if (answer.headers['sec-websocket-accept'] !== want) {
      socket.destroy()
      throw new SandboxError('the daemon accepted another handshake of a WebSocket')
    }
    return new WebSocket(socket, head)
  }

  /** messages yields messages until the server closes. The connection is read as they are taken. */
  async *messages(): AsyncGenerator<Message> {
    const reader = new ByteReader(body(this.socket), this.head)
    let op = 0 // of the message whose frames have begun
    let parts: Uint8Array[] = []
    let size = 0
    try {
      for (;;) {
        const head = await reader.take(2)
        if (!head) throw new ConnectionError('the connection ended without a close frame')
        const [first, second] = [head[0]!, head[1]!]
        const [final, code] = [(first & 0x80) !== 0, first & 0x0f]
        if (first & 0x70 || second & 0x80) throw new SandboxError('the daemon sent a malformed frame of a WebSocket')
        let length = second & 0x7f
        if (length >= 126) {
          const long = Buffer.from(await exactly(reader, length === 126 ? 2 : 8))
          const n = length === 126 ? BigInt(long.readUInt16BE()) : long.readBigUInt64BE()
          if (n > maxMessage) throw new SandboxError(`the daemon sent a frame of ${n} bytes`)
          length = Number(n)
        }
        const payload = length > 0 ? await exactly(reader, length) : new Uint8Array()
        switch (code) {
          case Op.Ping:
            this.frame(Op.Pong, payload)
            continue
          case Op.Pong:
            continue
          case Op.Close: {
            const status = length >= 2 ? Buffer.from(payload).readUInt16BE() : 1005
            if (!this.closing) this.frame(Op.Close, payload)
            if (status !== 1000) {
              const why = Buffer.from(payload).toString('utf8', 2)
              throw new ConnectionError(`the daemon closed the connection: ${status}${why && ' '}${why}`)
            }
            return
          }
          case Op.Text:
          case Op.Binary:
            if (op !== 0) throw new SandboxError('the daemon began a message within another')
            op = code
            break
          case Op.Continuation:
            if (op === 0) throw new SandboxError('the daemon continued a message that had not begun')
            break
          default:
            throw new SandboxError(`the daemon sent a frame of kind ${code}`)
        }
        if ((size += length) > maxMessage) throw new SandboxError(`the daemon sent a message of more than ${maxMessage} bytes`)
        parts.push(payload)
        if (!final) continue
        const data = parts.length === 1 ? parts[0]! : Buffer.concat(parts, size)
        yield op === Op.Text ? { text: Buffer.from(data.buffer, data.byteOffset, data.length).toString('utf8') } : { data }
        op = 0
        parts = []
        size = 0
      }
    } finally {
      this.socket.destroy()
    }
  }

  private frame(op: Op, payload: Uint8Array): void {
    const length = payload.length
    const mask = randomBytes(4)
    const head = length < 126 ? Buffer.from([0x80 | op, 0x80 | length]) : Buffer.alloc(4)
    if (length >= 126) { // only answers to pings, whose payload is as short, are sent
      head[0] = 0x80 | op
      head[1] = 0x80 | 126
      head.writeUInt16BE(length, 2)
    }
    const masked = Buffer.from(payload)
    for (let i = 0; i < length; i++) masked[i] = masked[i]! ^ mask[i & 3]!
    if (!this.socket.writableEnded) this.socket.write(Buffer.concat([head, mask, masked]))
  }

  /** close ends the connection. A reader gets an end or an error. */
  close(): void {
    if (this.closing) return
    this.closing = true
    this.frame(Op.Close, Buffer.from([0x03, 0xe8]))
    this.socket.destroy()
  }
}

async function exactly(reader: ByteReader, n: number): Promise<Uint8Array> {
  const bytes = await reader.take(n)
  if (!bytes) throw new ConnectionError('the connection ended within a frame')
  return bytes
}
