// Part of TestDaemonIsKilled, which kills the daemon when this prints "running".
import assert from 'node:assert/strict'
import { once } from 'node:events'
import { ConnectionError, Sandbox } from 'sandboxd'

const sandbox = await Sandbox.create()
let first
const begun = new Promise((resolve) => { first = resolve })
const handle = await sandbox.commands.run('echo one; while ! test -e /tmp/go; do read -t 0.05 x <> <(:); done; echo two; exit 5',
  { background: true, onStdout: first })
await begun
let second
const both = new Promise((resolve) => { second = resolve })
const foreground = sandbox.commands.run('echo; read x <> <(:)', { timeoutMs: 0, onStdout: second })
const cut = Promise.all([assert.rejects(handle.wait(), ConnectionError), assert.rejects(foreground, ConnectionError)])
await both
console.log('running')
await cut
await assert.rejects(sandbox.getInfo())
console.log('cut off')
await once(process.stdin, 'data')
process.stdin.destroy()
const again = await Sandbox.connect(sandbox.sandboxId)
await again.files.write('/tmp/go', '')
const rest = await again.commands.connect(handle.execId, { from: handle.received })
await assert.rejects(rest.wait(), { name: 'CommandExitError', exitCode: 5, stdout: 'two\n' })
assert.equal(handle.stdout + rest.stdout, 'one\ntwo\n')
assert.equal(await again.kill(), true)
console.log('complete')
