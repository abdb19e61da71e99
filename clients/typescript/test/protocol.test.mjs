// What a daemon never sends, from a server that is none: clear errors, no hang, no output taken for
// an end.
import assert from 'node:assert/strict'
import { createHash } from 'node:crypto'
import { once } from 'node:events'
import http from 'node:http'
import { after, before, test } from 'node:test'
import { ConnectionError, InternalError, NotFoundError, Sandbox, SandboxError } from 'sandboxd'

let answer // of every request but the first of a sandbox
let upgrade
const server = http.createServer((request, response) => {
  request.resume()
  if (request.url === '/v1/sandboxes/s' && request.method === 'GET') {
    json(response, 200, { id: 's', name: 's', cwd: '/', state: 'running', labels: {}, limits: {}, created_at: '2026-01-01T00:00:00Z' })
  } else answer(request, response)
})
server.on('upgrade', (request, socket) => { upgrade(request, socket) })
const json = (response, status, doc, type = 'application/json') => { response.writeHead(status, { 'content-type': type }); response.end(JSON.stringify(doc)) }

let sandbox
before(async () => {
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  sandbox = await Sandbox.connect('s', { url: `http://127.0.0.1:${server.address().port}` })
})
after(() => { server.close(); server.closeAllConnections() })

const frame = (channel, content) => {
  const payload = Buffer.from(content)
  const head = Buffer.alloc(5)
  head[0] = channel
  head.writeUInt32BE(payload.length, 1)
  return Buffer.concat([head, payload])
}
const stream = (...pieces) => (_, response) => {
  response.writeHead(200, { 'content-type': 'application/vnd.sandboxd.stream' })
  for (const piece of pieces) response.write(piece)
  response.end()
}
const event = (doc) => frame(3, JSON.stringify(doc))

test('answers that are none of a daemon', async () => {
  const bad = {
    html: (_, r) => { r.writeHead(200, { 'content-type': 'text/html' }); r.end('<html>') },
    'no type': (_, r) => { r.writeHead(200); r.end('{}') },
    'a bare error': (_, r) => { r.writeHead(502); r.end('bad gateway') },
    'a redirect': (_, r) => { r.writeHead(302, { location: 'http://127.0.0.1:1/' }); r.end() },
    'not JSON': (_, r) => { r.writeHead(200, { 'content-type': 'application/json' }); r.end('{') },
    'a problem that is none': (_, r) => { json(r, 404, { no: 'code' }, 'application/problem+json') },
    'a long problem': (_, r) => { json(r, 404, { code: 'not_found', detail: 'x'.repeat(1 << 20) }, 'application/problem+json') },
  }
  for (const [name, how] of Object.entries(bad)) {
    answer = how
    await assert.rejects(sandbox.commands.list(), (err) => err instanceof SandboxError && !(err instanceof NotFoundError) && err.message !== '', name)
  }
  answer = (_, r) => { json(r, 500, { code: 'internal', title: 't', status: 500, detail: 'broken', hint: 'report it' }, 'application/problem+json') }
  await assert.rejects(sandbox.commands.list(), (err) => err instanceof InternalError && err.message === 'broken (report it)' && err.hint === 'report it')
  answer = (_, r) => { json(r, 418, { code: 'of_a_later_version', title: 't', status: 418, detail: 'd' }, 'application/problem+json') }
  await assert.rejects(sandbox.commands.list(), (err) => err.constructor === SandboxError && err.code === 'of_a_later_version')
  answer = (_, r) => { r.writeHead(200, { 'content-type': 'application/json', 'content-length': 100 }); r.write('{"execs":'); r.destroy() }
  await assert.rejects(sandbox.commands.list(), ConnectionError)
  answer = (q) => { q.socket.destroy() }
  await assert.rejects(sandbox.commands.list(), ConnectionError)
})

test('streams of frames', async () => {
  const bad = {
    empty: [], 'no exit': [event({ pid: 1, exec: 'x' }), frame(1, 'out')], 'half a head': [Buffer.from([1, 0])], 'half a payload': [Buffer.from([1, 0, 0, 0, 9, 65])],
    'too long': [Buffer.from([1, 0xff, 0xff, 0xff, 0xff])], 'unknown channel': [frame(7, 'x')], 'no JSON': [frame(3, '{')],
    'an error': [event({ error: { code: 'gone', title: 't', status: 410, detail: 'the sandbox ended' } })],
  }
  for (const [name, pieces] of Object.entries(bad)) {
    answer = stream(...pieces)
    await assert.rejects(sandbox.commands.run('x'), (err) => err instanceof SandboxError && err.message !== '', name)
  }
  answer = (_, r) => { r.writeHead(200, { 'content-type': 'application/vnd.sandboxd.stream' }); r.write(frame(1, 'x'), () => r.destroy()) }
  await assert.rejects(sandbox.commands.run('x'), ConnectionError)
  // Any split into packets is the same.
  const whole = Buffer.concat([event({ pid: 1, exec: 'x' }), frame(1, 'a€'), frame(1, ''), frame(2, 'e'), event({ exit: { code: 0 } })])
  answer = async (_, r) => {
    r.writeHead(200, { 'content-type': 'application/vnd.sandboxd.stream' })
    for (const byte of whole) await new Promise((resolve) => r.write(Buffer.from([byte]), resolve))
    r.end()
  }
  const result = await sandbox.commands.run('x')
  assert.deepEqual([result.stdout, result.stderr], ['a€', 'e'])
  // The connection serves the next request when the answer has ended, however late.
  let late
  answer = (_, r) => { late = r; r.writeHead(200, { 'content-type': 'application/vnd.sandboxd.stream' }); r.write(event({ exit: { code: 0 } })) }
  await sandbox.commands.run('x')
  const { socket } = late
  let again
  answer = (q, r) => { again ||= q.socket === socket; json(r, 200, { execs: [] }) }
  late.end()
  // A free connection is taken if one more is needed than before.
  for (let n = 1; n < 30 && !again; n++) await Promise.all(Array.from({ length: n }, () => sandbox.commands.list()))
  assert.ok(again)
})

test('lines', async () => {
  const lines = (text) => (_, r) => { r.writeHead(200, { 'content-type': 'application/x-ndjson' }); r.end(text) }
  for (const bad of ['', '{"entry":', '{"entry":{}}', 'x\n', '{"error":{"code":"gone","detail":"d","title":"t","status":410}}\n', '[]\n']) {
    answer = lines(bad)
    await assert.rejects(sandbox.files.list('/'), Error, bad)
  }
  for (const bad of ['', '{"type":"started"}\n', '{"type":"other"}\n', '{"type":"end"', '{"problem":{"code":"gone","detail":"d","title":"t","status":410}}\n']) {
    answer = lines(bad)
    await assert.rejects(sandbox.runCode('x', { context: 'c' }), SandboxError, bad)
  }
})

test('WebSockets', async () => {
  const accept = (request, socket, key = request.headers['sec-websocket-key']) => {
    socket.on('error', () => {})
    const value = createHash('sha1').update(key + '258EAFA5-E914-47DA-95CA-C5AB0DC85B11').digest('base64')
    socket.write(`HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: ${value}\r\n\r\n`)
  }
  const piece = (first, payload) => {
    payload = Buffer.from(payload)
    if (payload.length < 126) return Buffer.concat([Buffer.from([first, payload.length]), payload])
    const head = Buffer.alloc(10)
    head[0] = first
    head[1] = 127
    head.writeBigUInt64BE(BigInt(payload.length), 2)
    return Buffer.concat([head, payload])
  }
  const text = (doc) => piece(0x81, JSON.stringify(doc))
  const begin = text({ pid: 5, exec: 'x' })
  const connect = async () => (await sandbox.commands.connect('x')).wait()

  const received = []
  upgrade = (request, socket) => {
    accept(request, socket)
    socket.on('data', (data) => { received.push(data) })
    socket.write(Buffer.concat([begin, piece(0x89, 'ping'), piece(0x02, '\x01a'), piece(0x00, Buffer.from([0xe2, 0x82])), piece(0x8a, ''), piece(0x80, Buffer.from([0xac])),
      piece(0x82, Buffer.concat([Buffer.from([1]), Buffer.alloc(70_000, 'z')])), text({ exit: { code: 0 } }), piece(0x88, Buffer.from([3, 0xe8]))]))
  }
  const result = await connect()
  assert.equal(result.stdout, 'a€' + 'z'.repeat(70_000))

  const endings = {
    'no close': begin, 'a status': Buffer.concat([begin, piece(0x88, Buffer.from([3, 0xf3]))]), 'another kind': Buffer.concat([begin, piece(0x83, 'x')]),
    masked: Buffer.concat([begin, Buffer.from([0x82, 0x81, 0, 0, 0, 0, 1])]), reserved: Buffer.concat([begin, piece(0xc2, 'x')]), long: Buffer.concat([begin, Buffer.from([0x82, 127, 0, 1, 0, 0, 0, 0, 0, 0])]),
    'within another': Buffer.concat([begin, piece(0x02, 'x'), piece(0x82, 'y')]), 'a continuation of nothing': Buffer.concat([begin, piece(0x80, 'x')]),
    'stdin': Buffer.concat([begin, piece(0x82, '\0x')]), 'no channel': Buffer.concat([begin, piece(0x82, '')]), 'no beginning': piece(0x82, '\x01x'), 'no pid': text({}), nothing: Buffer.alloc(0),
    'closed without an exit': Buffer.concat([begin, piece(0x88, Buffer.from([3, 0xe8]))]), 'not JSON': piece(0x81, '{'), 'an error': Buffer.concat([begin, text({ error: { code: 'gone', title: 't', status: 410, detail: 'd' } })]),
  }
  for (const [name, data] of Object.entries(endings)) {
    upgrade = (request, socket) => { accept(request, socket); socket.end(data) }
    await assert.rejects(connect(), (err) => err instanceof SandboxError && err.message !== '', name)
  }
  upgrade = (request, socket) => { accept(request, socket, 'other') }
  await assert.rejects(connect(), /handshake/)
  upgrade = (_, socket) => {
    const doc = JSON.stringify({ code: 'not_found', title: 't', status: 404, detail: 'no such exec' })
    socket.end(`HTTP/1.1 404 Not Found\r\nContent-Type: application/problem+json\r\nContent-Length: ${doc.length}\r\n\r\n${doc}`)
  }
  await assert.rejects(connect(), NotFoundError)
  upgrade = (_, socket) => { socket.destroy() }
  await assert.rejects(connect(), ConnectionError)
})
