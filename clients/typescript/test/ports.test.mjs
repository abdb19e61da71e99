import assert from 'node:assert/strict'
import { once } from 'node:events'
import net from 'node:net'
import { after, before, test } from 'node:test'
import { InvalidArgumentError, Sandbox, SandboxError } from 'sandboxd'

const server = `
const http = require('http'), net = require('net')
http.createServer((q, r) => {
  let body = ''
  q.on('data', (d) => { body += d })
  q.on('end', () => {
    if (q.url === '/teapot') { r.writeHead(418, { 'x-pot': 'tea', 'set-cookie': ['a=1', 'b=2'] }); r.end('short'); return }
    if (q.url === '/none') { r.writeHead(204); r.end(); return }
    r.end(JSON.stringify([q.method, q.url, q.headers['x-mine'] ?? null, body]))
  })
}).listen(8000, '127.0.0.1', () => net.createServer({ allowHalfOpen: true }, (c) => {
  let n = 0
  c.on('data', (d) => { n += d.length })
  c.on('end', () => c.end('got ' + n))
}).listen(9000, '127.0.0.1', () => console.log('listening')))`

let sandbox
before(async () => {
  sandbox = await Sandbox.create({ network: { mode: 'full' } })
  await sandbox.files.write('/tmp/server.cjs', server)
  let listening
  const ready = new Promise((resolve) => { listening = resolve })
  const handle = await sandbox.commands.run('node /tmp/server.cjs', { background: true, onStdout: listening })
  await Promise.race([ready, handle.wait()])
})
after(() => sandbox.kill())

test('requests', async () => {
  const { ports } = sandbox
  assert.deepEqual(await (await ports.fetch(8000, '/a%20b/c?d=%C3%A9&e=f g')).json(), ['GET', '/a%20b/c?d=%C3%A9&e=f%20g', null, ''])
  const posted = await ports.fetch(8000, '/', { method: 'post', headers: { 'X-Mine': 'yes' }, body: 'héllo' })
  assert.deepEqual(await posted.json(), ['POST', '/', 'yes', 'héllo'])
  const streamed = await ports.fetch(8000, '/', { method: 'PUT', body: (async function* () { yield 'a'; yield 'b' })() })
  assert.equal((await streamed.json())[3], 'ab')
  const teapot = await ports.fetch(8000, '/teapot')
  assert.deepEqual([teapot.status, teapot.ok, teapot.headers.get('x-pot'), teapot.headers.getSetCookie(), await teapot.text()], [418, false, 'tea', ['a=1', 'b=2'], 'short'])
  assert.equal((await ports.fetch(8000, '/none')).status, 204)
  assert.equal(await (await ports.fetch(8000, '/teapot', { method: 'HEAD' })).text(), '')
  const nothing = await ports.fetch(8001, '/')
  assert.equal(nothing.headers.get('content-type'), 'application/problem+json')
  await assert.rejects(ports.fetch(8000, 'relative'), InvalidArgumentError)
  await assert.rejects(ports.fetch(0, '/'), InvalidArgumentError)
})

test('connections', async () => {
  const conn = await sandbox.ports.connect(9000)
  conn.write('x'.repeat(100_000))
  conn.end('yz')
  let answer = ''
  for await (const chunk of conn) answer += chunk
  assert.equal(answer, 'got 100002')
  await assert.rejects(sandbox.ports.connect(9001), SandboxError)
})

test('forwards', async () => {
  const forward = await sandbox.ports.forward(8000)
  assert.equal(forward.url, `http://127.0.0.1:${forward.port}`)
  assert.equal((await (await fetch(forward.url + '/here')).json())[1], '/here')
  await forward.close()
  await assert.rejects(fetch(forward.url))
  const raw = await sandbox.ports.forward(9000)
  const conn = net.connect(raw.port, raw.host)
  conn.end('z'.repeat(5000))
  let answer = ''
  for await (const chunk of conn) answer += chunk
  assert.equal(answer, 'got 5000')
  const idle = net.connect(raw.port, raw.host)
  await once(idle, 'connect')
  idle.on('error', () => {})
  const closed = once(idle, 'close')
  await raw.close()
  await closed
  const nowhere = await sandbox.ports.forward(9001)
  const refused = net.connect(nowhere.port, nowhere.host)
  refused.on('error', () => {})
  await once(refused, 'close')
  await nowhere[Symbol.asyncDispose]()
})
