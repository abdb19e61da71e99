import assert from 'node:assert/strict'
import { once } from 'node:events'
import { mkdtempSync, rmSync, symlinkSync } from 'node:fs'
import net from 'node:net'
import { tmpdir } from 'node:os'
import path from 'node:path'
import { after, test } from 'node:test'
import {
  AlreadyExistsError, ConflictError, InvalidArgumentError, NotFoundError, NotRunningError, Sandbox, SandboxError, TimeoutError, defaultSocket,
} from 'sandboxd'

const label = `test-${process.pid}`
const create = (opts) => Sandbox.create({ ...opts, metadata: { label, ...opts?.metadata } })
after(async () => {
  for await (const { sandboxId } of Sandbox.list({ query: { metadata: { label }, state: ['running', 'paused', 'stopped', 'lost'] } })) {
    await Sandbox.kill(sandboxId)
  }
})

test('a life', async () => {
  const sandbox = await create({ envs: { A: 'b=c', EMPTY: '' }, cwd: '/work', timeoutMs: 700_000, name: `${label}-life` })
  const info = await sandbox.getInfo()
  assert.equal(info.sandboxId, sandbox.sandboxId)
  assert.equal(info.name, `${label}-life`)
  assert.equal(info.templateId, 'host')
  assert.equal(info.state, 'running')
  assert.equal(info.metadata.label, label)
  assert.equal(info.record.idle_timeout, 700)
  const left = info.endAt - info.startedAt
  assert.ok(left > 600_000 && left < 800_000, `${left} ms`)
  assert.equal((await sandbox.commands.run('echo "$A,$EMPTY,$PWD"')).stdout, 'b=c,,/work\n')

  await sandbox.setTimeout(1_200_000)
  const later = await sandbox.getInfo()
  assert.ok(later.endAt > info.endAt)
  assert.equal(later.record.idle_timeout, 1200)
  await Sandbox.setTimeout(sandbox.sandboxId, 300_000)
  assert.ok((await Sandbox.getInfo(sandbox.sandboxId)).endAt < info.endAt)
  // Connecting never shortens a life.
  const soon = (await sandbox.getInfo()).endAt
  const other = await Sandbox.connect(`${label}-life`, { timeoutMs: 1000 })
  assert.equal(other.sandboxId, sandbox.sandboxId)
  assert.deepEqual((await other.getInfo()).endAt, soon)
  await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 900_000 })
  assert.ok((await sandbox.getInfo()).endAt > soon)

  assert.equal(await sandbox.isRunning(), true)
  assert.equal(await sandbox.pause(), true)
  assert.equal(await sandbox.pause(), false)
  assert.equal(await sandbox.isRunning(), false)
  await assert.rejects(sandbox.commands.run('true'), ConflictError)
  await Sandbox.connect(sandbox.sandboxId) // which resumes it
  assert.equal(await sandbox.isRunning(), true)
  await sandbox.pause()
  await sandbox.resume()
  await sandbox.files.write('kept', 'yes')
  assert.equal((await sandbox.stop({ graceMs: 0 })).state, 'stopped')
  assert.equal(await sandbox.files.read('/work/kept'), 'yes')
  assert.equal((await sandbox.start()).state, 'running')
  assert.equal((await sandbox.commands.run('cat kept')).stdout, 'yes')

  assert.equal(await sandbox.kill(), true)
  assert.equal(await sandbox.kill(), false)
  assert.equal(await Sandbox.kill(sandbox.sandboxId), false)
  assert.equal(await sandbox.isRunning(), false)
  for (const gone of [
    () => sandbox.getInfo(), () => sandbox.commands.run('true'), () => sandbox.commands.run('true', { background: true }), () => sandbox.files.read('/x'),
    () => sandbox.files.exists('/x'), () => sandbox.files.remove('/x'), () => sandbox.pause(), () => Sandbox.connect(sandbox.sandboxId),
  ]) {
    await assert.rejects(gone(), (err) => err instanceof NotFoundError && err.code === 'not_found' && err.status === 404 && err.detail.includes(sandbox.sandboxId))
  }
})

test('lists', async () => {
  const [one, two] = [await create({ metadata: { n: '1', odd: 'a=b,c' } }), await create({ metadata: { n: '2' } })]
  const list = async (opts) => { const all = []; for await (const i of Sandbox.list(opts)) all.push(i.sandboxId); return all }
  assert.deepEqual(await list({ query: { metadata: { label, n: '1' } } }), [one.sandboxId])
  assert.deepEqual(await list({ query: { metadata: { odd: 'a=b,c', label } } }), [one.sandboxId])
  await two.pause()
  assert.ok((await list({ query: { metadata: { label }, state: ['running'] } })).includes(one.sandboxId))
  assert.ok(!(await list({ query: { metadata: { label }, state: ['running'] } })).includes(two.sandboxId))
  assert.ok((await list({ query: { metadata: { label } } })).includes(two.sandboxId))
  const paginator = Sandbox.list({ query: { metadata: { label, n: '2' } }, limit: 5 })
  assert.equal(paginator.hasNext, true)
  assert.equal((await paginator.nextItems()).length, 1)
  assert.equal(paginator.hasNext, false)
  await assert.rejects(paginator.nextItems(), InvalidArgumentError)
})

test('forks and snapshots', async () => {
  const sandbox = await create()
  await sandbox.files.write('/tmp/f', 'one')
  const snapshot = await sandbox.snapshot({ name: `${label}-s` })
  assert.deepEqual(snapshot.names, [`${label}-s`])
  await sandbox.files.write('/tmp/f', 'two')
  const forks = await sandbox.fork({ count: 2, metadata: { fork: 'yes' }, envs: { F: '1' } })
  assert.equal(forks.length, 2)
  for (const fork of forks) {
    assert.equal(await fork.files.read('/tmp/f'), 'two')
    assert.equal((await fork.commands.run('echo $F')).stdout, '1\n')
  }
  await forks[0].files.write('/tmp/f', 'other')
  assert.equal(await sandbox.files.read('/tmp/f'), 'two')
  const old = await create({ snapshot: snapshot.snapshotId })
  assert.equal(await old.files.read('/tmp/f'), 'one')
  await sandbox.rollback(snapshot.snapshotId)
  assert.equal(await sandbox.files.read('/tmp/f'), 'one')
  for (const s of [sandbox, old, ...forks]) await s.kill()
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false)
})

test('disposal and ties', async () => {
  const sandbox = await create()
  await sandbox[Symbol.asyncDispose]()
  assert.equal(await sandbox.isRunning(), false)
  await sandbox[Symbol.asyncDispose]() // again
  const tied = await create({ tied: true })
  assert.equal((await tied.commands.run('echo hi')).stdout, 'hi\n')
  assert.equal(await tied.kill(), true)
})

test('errors', async () => {
  await assert.rejects(Sandbox.connect('no-such-sandbox'), NotFoundError)
  await assert.rejects(Sandbox.create('localhost:1/no/image:1'), NotFoundError)
  const sandbox = await create({ name: `${label}-name` })
  await assert.rejects(create({ name: `${label}-name` }), (err) => err instanceof AlreadyExistsError && err instanceof SandboxError && err.status === 409)
  for (const bad of [
    () => create({ name: 'no spaces' }), () => create({ envs: { 'A=B': '' } }), () => create({ envs: { '': '' } }), () => create({ timeoutMs: NaN }),
    () => create({ timeoutMs: -5 }), () => Sandbox.connect(''), () => Sandbox.connect('.'), () => Sandbox.connect('..'), () => Sandbox.connect('\ud800'),
    () => sandbox.setTimeout(0), () => create({ request: { no_such_field: 1 } }), () => create({ image: 'host', snapshot: 'x' }),
    () => Sandbox.create({ url: 'ftp://localhost' }), () => Sandbox.create({ url: 'nonsense' }), () => Sandbox.create({ url: 'http://localhost?x=1' }),
    () => Sandbox.create({ url: 'http://localhost', socket: '/x' }), () => Sandbox.create({ headers: { 'bad header': 'x' } }),
  ]) {
    await assert.rejects(async () => bad(), InvalidArgumentError, bad.toString())
  }
  await assert.rejects(Sandbox.connect('../system'), NotFoundError) // escaped
  await assert.rejects(Sandbox.create({ socket: '/nowhere/api.sock' }), (err) => err instanceof NotRunningError && err.message.includes('/nowhere/api.sock'))
  await assert.rejects(Sandbox.create({ url: 'http://127.0.0.1:1' }), NotRunningError)
  await sandbox.kill()
})

test('signals and timeouts of requests', async () => {
  const reason = new Error('enough')
  await assert.rejects(Sandbox.create({ signal: AbortSignal.abort(reason) }), reason)
  const silent = net.createServer((conn) => { conn.resume() }) // takes requests and says nothing
  silent.listen(0, '127.0.0.1')
  await once(silent, 'listening')
  const url = `http://127.0.0.1:${silent.address().port}`
  const stop = new AbortController()
  const waiting = Sandbox.connect('x', { url, signal: stop.signal })
  silent.once('connection', (conn) => { conn.on('error', () => {}); stop.abort(reason) })
  await assert.rejects(waiting, reason)
  await assert.rejects(Sandbox.connect('x', { url, requestTimeoutMs: 20 }), TimeoutError)
  silent.close()
})

test('over TCP, and over a long path', async () => {
  const connections = new Set()
  const forwarder = net.createServer({ allowHalfOpen: true }, (outside) => {
    const inside = net.connect({ path: defaultSocket(), allowHalfOpen: true })
    outside.pipe(inside).pipe(outside)
    for (const c of [outside, inside]) {
      connections.add(c)
      c.on('error', () => { outside.destroy(); inside.destroy() })
    }
  })
  forwarder.listen(0, '127.0.0.1')
  await once(forwarder, 'listening')
  const long = path.join(mkdtempSync(path.join(tmpdir(), 'long-')), 'd'.repeat(120))
  symlinkSync(path.dirname(defaultSocket()), long)
  for (const where of [{ url: `http://127.0.0.1:${forwarder.address().port}/` }, { socket: path.join(long, 'api.sock') }]) {
    const sandbox = await create(where)
    assert.equal((await sandbox.commands.run('cat', { stdin: 'over' })).stdout, 'over')
    const handle = await sandbox.commands.run('cat', { background: true, stdin: true })
    await handle.sendStdin('héllo')
    await handle.closeStdin()
    assert.equal((await handle.wait()).stdout, 'héllo')
    await sandbox.files.write('/tmp/f', 'x'.repeat(1 << 20))
    assert.equal((await sandbox.files.read('/tmp/f')).length, 1 << 20)
    await sandbox.kill()
  }
  rmSync(path.dirname(long), { recursive: true })
  forwarder.close()
  for (const c of connections) c.destroy()
})
