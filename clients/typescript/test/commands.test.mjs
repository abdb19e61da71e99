import assert from 'node:assert/strict'
import { createHash } from 'node:crypto'
import { after, before, test } from 'node:test'
import {
  CommandExitError, InvalidArgumentError, NotFoundError, ProgramNotAllowedError, ProgramNotFoundError, Sandbox, SandboxError,
} from 'sandboxd'
import { timedOut } from './support.mjs'

let sandbox
before(async () => { sandbox = await Sandbox.create() })
after(() => sandbox.kill())
const hash = (data) => createHash('sha256').update(data).digest('hex')
/** Returns a promise and what fulfils it. */
const promise = () => { let done; const p = new Promise((resolve) => { done = resolve }); return [p, done] }
/** Blocks forever, in bash itself. */
const forever = 'read x <> <(:)'

test('output, exit and environment', async () => {
  const pieces = []
  const result = await sandbox.commands.run('echo out; echo err >&2; echo "$V:$PWD"', {
    envs: { V: 'wörld' }, cwd: '/tmp', onStdout: (s) => { pieces.push(s) }, onStderr: (s) => { pieces.push('!' + s) },
  })
  assert.equal(result.exitCode, 0)
  assert.equal(result.stdout, 'out\nwörld:/tmp\n')
  assert.equal(result.stderr, 'err\n')
  assert.equal(result.error, undefined)
  assert.equal(pieces.filter((s) => s[0] !== '!').join(''), result.stdout)
  assert.equal(pieces.filter((s) => s[0] === '!').join('').slice(1), result.stderr)
  assert.deepEqual(JSON.parse(JSON.stringify(result)).stdout, result.stdout)
  assert.equal((await sandbox.commands.run(['printf', '%s|', 'a b', '$X'])).stdout, 'a b|$X|')
  assert.equal((await sandbox.commands.run('echo $0', { shell: ['sh', '-c'] })).stdout, 'sh\n')
  await assert.rejects(sandbox.commands.run('echo some; echo why >&2; exit 7'), (err) => {
    assert.ok(err instanceof CommandExitError && err instanceof SandboxError)
    assert.deepEqual([err.exitCode, err.stdout, err.stderr, err.error], [7, 'some\n', 'why\n', undefined])
    assert.match(err.message, /exit code 7.*why/)
    return true
  })
  await assert.rejects(sandbox.commands.run('kill -9 $$'), { exitCode: 137, error: 'signal: SIGKILL' })
})

test('characters that come in pieces', async () => {
  const pieces = []
  const script = String.raw`printf 'a\xe2'; read -t 0.02 x <> <(:); printf '\x82'; read -t 0.02 x <> <(:); printf '\xacb\xf0\x9f'; read -t 0.02 x <> <(:); printf '\x98\x80\xff\xe2'`
  const result = await sandbox.commands.run(script, { onStdout: (s) => { pieces.push(s) } })
  assert.equal(result.stdout, 'a€b😀\ufffd\ufffd')
  assert.equal(pieces.join(''), result.stdout)
  assert.ok(pieces.every((s) => s !== ''))
  assert.equal(Buffer.from(result.stdoutBytes).toString('hex'), '61e282ac62f09f9880ffe2')
  const bom = await sandbox.commands.run(String.raw`printf '\xef\xbb\xbfx'`, { onStdout: (s) => { pieces.length = 0; pieces.push(s) } })
  assert.equal(bom.stdout, '\ufeffx')
  assert.deepEqual(pieces, ['\ufeffx'])
})

test('no byte is lost', async () => {
  const size = 12 << 20
  const script = `head -c ${size} /dev/urandom >/tmp/random; sha256sum /tmp/random >&2; cat /tmp/random`
  for (const background of [false, true]) {
    // The program waits for a reader that takes its time.
    let first = true
    const onStdout = async () => {
      if (!first) return
      first = false
      for (let i = 0; i < 50 && (await sandbox.commands.list()).some((c) => c.args.includes(script)); i++);
    }
    let result = await sandbox.commands.run(script, { background, onStdout })
    if (background) result = await result.wait()
    assert.equal(result.stdoutBytes.length, size)
    assert.equal(result.stderr.slice(0, 64), hash(result.stdoutBytes))
    assert.equal(result.dropped, 0)
  }
  // A client that connects is waited for, too.
  const begun = await sandbox.commands.run('read; cat /tmp/random', { background: true, stdin: true })
  let first = true
  const slow = await sandbox.commands.connect(begun.execId, { onStdout: async () => {
    if (!first) return
    first = false
    for (let i = 0; i < 50 && (await sandbox.commands.list()).some((c) => c.execId === begun.execId); i++);
  } })
  await begun.disconnect()
  await sandbox.commands.sendStdin(begun.pid, '\n')
  const { stdoutBytes, dropped } = await slow.wait()
  assert.deepEqual([stdoutBytes.length, dropped], [size, 0])
  // Ends together with a stderr that is as long.
  const both = await sandbox.commands.run('head -c 3000000 /dev/zero; head -c 3000000 /dev/zero >&2')
  assert.deepEqual([both.stdoutBytes.length, both.stderrBytes.length], [3000000, 3000000])
})

test('input', async () => {
  const data = Buffer.alloc(3 << 20, 'xyz\n')
  assert.equal((await sandbox.commands.run('sha256sum', { stdin: data })).stdout.slice(0, 64), hash(data))
  assert.equal((await sandbox.commands.run('cat', { stdin: 'é' })).stdout, 'é')
  assert.equal((await sandbox.commands.run('cat')).stdout, '') // none
  await assert.rejects(sandbox.commands.run('cat', { stdin: true }), InvalidArgumentError)
  const handle = await sandbox.commands.run('cat; echo end', { background: true, stdin: true })
  const sent = []
  for (let i = 0; i < 50; i++) sent.push(handle.sendStdin(`line ${i}\n`)) // in their order, without waiting
  sent.push(handle.sendStdin(new Uint8Array([0xe2, 0x82])), handle.sendStdin(new Uint8Array([0xac])))
  sent.push(handle.sendStdin((async function* () { yield 'streamed'; yield Buffer.from('\n') })()), handle.closeStdin())
  await Promise.all(sent)
  const { stdout } = await handle.wait()
  assert.equal(stdout, Array.from({ length: 50 }, (_, i) => `line ${i}\n`).join('') + '€streamed\nend\n')
  await assert.rejects(handle.sendStdin('late'))
})

test('background commands', async () => {
  const [begun, begin] = promise()
  const handle = await sandbox.commands.run(`echo started; ${forever}`, { background: true, onStdout: begin })
  await begun
  assert.equal(handle.exitCode, undefined)
  assert.equal(handle.stdout, 'started\n')
  const [info] = (await sandbox.commands.list()).filter((c) => c.pid === handle.pid)
  assert.deepEqual([info.execId, info.cmd, info.background, info.tty], [handle.execId, 'bash', true, false])
  assert.ok(info.startedAt instanceof Date)

  const [again, replayed] = promise()
  const second = await sandbox.commands.connect(handle.pid, { onStdout: replayed })
  assert.equal(await again, 'started\n') // from the start
  const third = await sandbox.commands.connect(handle.execId, { from: 4 })
  await assert.rejects(handle.wait({ signal: AbortSignal.abort(new Error('no patience')) }), /no patience/)
  await second.disconnect()
  await assert.rejects(second.wait(), /disconnected/)

  assert.equal(await handle.kill(), true)
  await assert.rejects(handle.wait(), { name: 'CommandExitError', exitCode: 137, error: 'signal: SIGKILL' })
  await assert.rejects(third.wait(), { stdout: 'ted\n' })
  assert.equal(handle.exitCode, 137)
  assert.equal(await handle.kill(), false)
  assert.equal(await sandbox.commands.kill(handle.execId), false)
  assert.equal(await sandbox.commands.kill(999_999), false)
  await assert.rejects(sandbox.commands.connect(999_999), NotFoundError)
  assert.ok(!(await sandbox.commands.list()).some((c) => c.execId === handle.execId))

  const [trappedReady, ready] = promise()
  const script = 'import signal as s; s.pthread_sigmask(s.SIG_BLOCK, {2}); print("ready", flush=True); s.sigwait({2}); print("caught"); exit(3)'
  const trapped = await sandbox.commands.run(['python3', '-c', script], { background: true, onStdout: ready })
  await trappedReady
  await trapped.sendSignal('SIGINT')
  await assert.rejects(trapped.wait(), { exitCode: 3, stdout: 'ready\ncaught\n' })
  // An end that is seen later.
  const short = await sandbox.commands.run('echo done', { background: true })
  assert.equal((await short.wait()).stdout, 'done\n')
  assert.equal((await (await sandbox.commands.connect(short.execId)).wait()).stdout, 'done\n')
})

test('timeouts keep the output', async () => {
  for (const background of [false, true]) {
    const { result } = await timedOut(async (timeoutMs) => {
      const run = await sandbox.commands.run(`echo begun; ${forever}`, { timeoutMs, background })
      return background ? run.wait() : run
    }, (result) => result.stdout)
    assert.equal(result.stdout, 'begun\n')
    assert.equal(result.timedOut, true)
  }
})

test('an aborted signal kills a command', async () => {
  const stop = new AbortController()
  const [begun, begin] = promise()
  const reason = new Error('stop it')
  const run = sandbox.commands.run(`echo $$; ${forever}`, { signal: stop.signal, onStdout: begin })
  const pid = (await begun).trim()
  stop.abort(reason)
  await assert.rejects(run, reason)
  await sandbox.commands.run(`while test -e /proc/${pid}; do read -t 0.01 x <> <(:); done; true`)
  // In a callback, too; and before.
  const second = new AbortController()
  await assert.rejects(sandbox.commands.run(`echo x; ${forever}`, { signal: second.signal, onStdout: () => { second.abort(reason) } }), reason)
  await assert.rejects(sandbox.commands.run('true', { signal: stop.signal }), reason)
  await assert.rejects(sandbox.commands.run('true', { signal: stop.signal, background: true }), reason)
})

test('a callback that throws ends a command', async () => {
  const wrong = new Error('wrong')
  await assert.rejects(sandbox.commands.run(`echo x; ${forever}`, { onStdout: () => { throw wrong } }), wrong)
  await assert.rejects(sandbox.commands.run(`echo x >&2; ${forever}`, { onStderr: async () => { throw wrong } }), wrong)
  const handle = await sandbox.commands.run(`echo x; ${forever}`, { background: true, onStdout: () => { throw wrong } })
  await assert.rejects(handle.wait(), wrong)
  assert.equal(await handle.kill(), true)
})

test('programs that cannot be run', async () => {
  const before = new Set((await sandbox.commands.list()).map((c) => c.execId))
  for (const background of [false, true]) {
    await assert.rejects(sandbox.commands.run(['no-such-program'], { background }), ProgramNotFoundError)
    await assert.rejects(sandbox.commands.run(['/etc/passwd'], { background }), ProgramNotAllowedError)
    await assert.rejects(sandbox.commands.run('true', { background, cwd: 'relative' }), InvalidArgumentError)
    await assert.rejects(sandbox.commands.run('true', { background, shell: ['no-such-shell'] }), ProgramNotFoundError)
    await assert.rejects(sandbox.commands.run([], { background }), InvalidArgumentError)
  }
  assert.ok((await sandbox.commands.list()).every((c) => before.has(c.execId)))
})

test('many at a time', async () => {
  const results = await Promise.all(Array.from({ length: 24 }, (_, i) => sandbox.commands.run(`echo ${i}`)))
  assert.deepEqual(results.map((r) => r.stdout), Array.from({ length: 24 }, (_, i) => `${i}\n`))
})

test('terminals', async () => {
  let screen = ''
  let seen = () => {}
  const decoder = new TextDecoder()
  const onData = (data) => { screen += decoder.decode(data, { stream: true }); seen() }
  const until = (text) => new Promise((resolve) => { seen = () => { if (screen.includes(text)) resolve() }; seen() })
  const terminal = await sandbox.pty.create({ cols: 99, rows: 33, onData, envs: { PS1: '' }, cmd: ['bash', '--norc', '--noprofile'] })
  await sandbox.pty.sendInput(terminal.pid, 'stty size; echo $TERM; tty\n')
  await until('33 99')
  await until('xterm-256color')
  await until('/dev/pts/')
  await sandbox.pty.resize(terminal.pid, { cols: 120, rows: 40 })
  await terminal.sendStdin('stty size\n')
  await until('40 120')
  assert.ok((await sandbox.commands.list()).some((c) => c.pid === terminal.pid && c.tty))
  let other = ''
  const second = await sandbox.pty.connect(terminal.pid, { onData: (data) => { other += Buffer.from(data).toString() } })
  await terminal.sendStdin('exit 6\n')
  await assert.rejects(terminal.wait(), { exitCode: 6 })
  await assert.rejects(second.wait(), { exitCode: 6 })
  assert.ok(other.includes('33 99'))
  const shell = await sandbox.pty.create()
  assert.equal(await sandbox.pty.kill(shell.pid), true)
  await assert.rejects(shell.wait(), { exitCode: 137 })
})
