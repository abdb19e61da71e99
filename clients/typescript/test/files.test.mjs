import assert from 'node:assert/strict'
import { createHash, randomBytes } from 'node:crypto'
import { after, before, test } from 'node:test'
import { Readable } from 'node:stream'
import { AlreadyExistsError, ConflictError, FileType, InvalidArgumentError, NotFoundError, Sandbox, SandboxError } from 'sandboxd'

let sandbox
before(async () => { sandbox = await Sandbox.create({ cwd: '/work' }) })
after(() => sandbox.kill())
const hash = (data) => createHash('sha256').update(data).digest('hex')

test('content in all forms', async () => {
  const { files } = sandbox
  assert.deepEqual(await files.write('/tmp/deep/er/a b+c%41?.txt', 'héllo\0'), { name: 'a b+c%41?.txt', path: '/tmp/deep/er/a b+c%41?.txt', type: 'file' })
  assert.equal(await files.read('/tmp/deep/er/a b+c%41?.txt'), 'héllo\0')
  const data = randomBytes(5 << 20)
  const inputs = {
    bytes: data, buffer: data.buffer.slice(data.byteOffset, data.byteOffset + data.length), blob: new Blob([data]), web: new Blob([data]).stream(),
    node: Readable.from([data.subarray(0, 1000), data.subarray(1000)]), generator: (async function* () { for (let i = 0; i < data.length; i += 100_000) yield data.subarray(i, i + 100_000) })(),
  }
  for (const [name, input] of Object.entries(inputs)) {
    await files.write(`/tmp/${name}`, input)
    assert.equal(hash(await files.read(`/tmp/${name}`, { format: 'bytes' })), hash(data), name)
  }
  assert.equal(hash(new Uint8Array(await (await files.read('/tmp/bytes', { format: 'blob' })).arrayBuffer())), hash(data))
  const digest = createHash('sha256')
  for await (const chunk of await files.read('/tmp/bytes', { format: 'stream' })) digest.update(chunk)
  assert.equal(digest.digest('hex'), hash(data))
  const partly = (await files.read('/tmp/bytes', { format: 'stream' })).getReader()
  await partly.read()
  await partly.cancel()
  await files.write('/tmp/empty', '')
  assert.equal(await files.read('/tmp/empty'), '')
  assert.equal((await files.read('/tmp/empty', { format: 'bytes' })).length, 0)
  await files.write('/tmp/log', 'one\n', { mode: 0o600 })
  await files.write('/tmp/log', 'two\n', { append: true })
  assert.equal(await files.read('/tmp/log'), 'one\ntwo\n')
  assert.equal((await files.getInfo('/tmp/log')).permissions, '-rw-------')
  const written = await files.write([{ path: 'x', data: '1' }, { path: './y', data: '2' }])
  assert.deepEqual(written.map((w) => w.path), ['/work/x', '/work/y'])
})

test('uploads that fail', async () => {
  const { files } = sandbox
  await files.write('/tmp/old', 'old')
  const wrong = new Error('source')
  await assert.rejects(files.write('/tmp/old', (async function* () { yield 'new'; throw wrong })()), wrong)
  assert.equal(await files.read('/tmp/old'), 'old') // whole or not at all
  // Refused before anything is sent, however much it is.
  let pulled = 0
  const endless = (async function* () { for (;;) { pulled++; yield Buffer.alloc(1 << 16) } })()
  await assert.rejects(files.write('/proc/version', endless), SandboxError)
  await assert.rejects(files.write('/tmp', Buffer.alloc(8 << 20)), SandboxError)
  assert.ok(pulled < 100, `${pulled} pieces were sent`)
  const stop = new AbortController()
  const upload = files.write('/tmp/old', (async function* () { yield 'x'; stop.abort(wrong); yield 'y'; await new Promise(() => {}) })(), { signal: stop.signal })
  await assert.rejects(upload, wrong)
  assert.equal(await files.read('/tmp/old'), 'old')
  await assert.rejects(files.write('/tmp/none'), InvalidArgumentError)
})

test('directories and entries', async () => {
  const { files } = sandbox
  assert.equal(await files.makeDir('/d/e/f'), true)
  assert.equal(await files.makeDir('/d/e/f'), false)
  assert.equal(await files.makeDir('/d/g', { mode: 0o777 }), true)
  await files.write('/d/file', 'x')
  await assert.rejects(files.makeDir('/d/file'), AlreadyExistsError)
  await sandbox.commands.run('ln -s file /d/link; ln -s nowhere /d/broken; mkfifo /d/fifo; chmod 4755 /d/file; chmod 2640 /d/fifo; chmod 1777 /d/g')
  const list = await files.list('/d')
  assert.deepEqual(list.map((e) => [e.name, e.path, e.type, e.permissions]), [
    ['broken', '/d/broken', FileType.SYMLINK, 'lrwxrwxrwx'], ['e', '/d/e', FileType.DIR, 'drwxr-xr-x'], ['fifo', '/d/fifo', FileType.FIFO, 'prw-r-S---'],
    ['file', '/d/file', FileType.FILE, '-rwsr-xr-x'], ['g', '/d/g', FileType.DIR, 'drwxrwxrwt'], ['link', '/d/link', FileType.SYMLINK, 'lrwxrwxrwx'],
  ])
  assert.deepEqual([list[5].symlinkTarget, list[3].size, list[3].owner, list[3].mode], ['file', 1, 'root', 0o4755])
  assert.ok(list[3].modifiedTime instanceof Date && !Number.isNaN(+list[3].modifiedTime))
  assert.deepEqual((await files.list('/d', { depth: 3 })).map((e) => e.path).filter((p) => p.startsWith('/d/e')), ['/d/e', '/d/e/f'])
  assert.equal((await files.getInfo('/d/link')).type, 'symlink')
  assert.equal((await files.getInfo('/d/link', { follow: true })).type, 'file')
  assert.deepEqual([await files.exists('/d/file'), await files.exists('/d/broken'), await files.exists('/d/nope')], [true, true, false])
  const moved = await files.rename('/d/file', '/d/other')
  assert.deepEqual([moved.path, moved.type, moved.size], ['/d/other', 'file', 1])
  await files.write('/d/taken', '')
  await assert.rejects(files.rename('/d/other', '/d/taken'), AlreadyExistsError)
  await files.rename('/d/other', '/d/taken', { overwrite: true })
  await files.remove('/d/e')
  assert.equal(await files.exists('/d/e'), false)
  await files.remove('/d/e') // a missing one is no error
  await sandbox.commands.run('mkdir /many; cd /many; touch $(seq 12000)')
  assert.equal((await files.list('/many')).length, 12000)
})

test('errors', async () => {
  const { files } = sandbox
  for (const missing of [() => files.read('/nope'), () => files.list('/nope'), () => files.getInfo('/nope'), () => files.rename('/nope', '/x'), () => files.read('/nope', { format: 'stream' })]) {
    await assert.rejects(missing(), NotFoundError)
  }
  for (const bad of [() => files.read('/a/../b'), () => files.read(''), () => files.read('/\ud800'), () => files.write('/x', 'x', { mode: 0o77777777 }), () => files.read('/d')]) {
    await assert.rejects(async () => bad(), InvalidArgumentError, bad.toString())
  }
  await sandbox.pause()
  await assert.rejects(files.exists('/x'), ConflictError)
  await sandbox.resume()
})

test('names that are no UTF-8', async () => {
  const { files } = sandbox
  const name = Buffer.concat([Buffer.from('/odd/'), Buffer.from([0xff, 0x41]), Buffer.from(' é')])
  await files.makeDir('/odd')
  await files.write(name, 'odd')
  assert.equal(await files.read(name), 'odd')
  const [entry] = await files.list('/odd')
  assert.deepEqual(Buffer.from(entry.pathBytes), name)
  assert.equal(entry.name, '\ufffdA é')
  const other = Buffer.concat([Buffer.from('/odd/'), Buffer.from([0xfe])])
  assert.deepEqual(Buffer.from((await files.rename(entry.pathBytes, other)).pathBytes), other)
  assert.equal(await files.makeDir(Buffer.concat([other, Buffer.from('d')])), true)
  await files.remove(other)
  assert.equal(await files.exists(other), false)
})

test('watches', async () => {
  const { files } = sandbox
  await files.makeDir('/watched/sub')
  const events = []
  let seen = () => {}
  const exits = []
  const handle = await files.watchDir('/watched', (e) => { events.push(e); seen() }, { recursive: true, onExit: (err) => { exits.push(err) } })
  const until = (check) => new Promise((resolve) => { seen = () => { if (events.some(check)) resolve() }; seen() })
  await files.write('/watched/sub/new', 'x')
  await until((e) => e.name === 'sub/new' || e.type === 'rename' && e.path === '/watched/sub/new')
  await files.rename('/watched/sub/new', '/watched/moved')
  await until((e) => e.type === 'rename' && e.name === 'moved' && e.from === '/watched/sub/new')
  await files.remove('/watched/moved')
  await until((e) => e.type === 'remove' && e.name === 'moved')
  await handle.stop()
  const count = events.length
  await files.write('/watched/after', 'x')
  assert.deepEqual([events.length, exits], [count, [undefined]])
  await assert.rejects(files.watchDir('/nope', () => {}), NotFoundError)
  // The end of the sandbox is a reason.
  const other = await Sandbox.create()
  const exit = new Promise((resolve) => { other.files.watchDir('/tmp', () => {}, { onExit: resolve }).then(() => other.kill()) })
  assert.ok(await exit instanceof SandboxError)
})
