import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { Execution, InvalidArgumentError, NotFoundError, OutputMessage, Result, Sandbox } from 'sandboxd'
import { timedOut } from './support.mjs'

let sandbox
before(async () => { sandbox = await Sandbox.create() })
after(() => sandbox.kill())

test('values, output and errors', async () => {
  const seen = { out: [], err: [], results: [], errors: [] }
  const run = await sandbox.runCode('import os, sys\nprint("héllo", os.environ["A"])\nprint("err", file=sys.stderr)\nx = 20\nx + 22', {
    envs: { A: 'b' }, onStdout: (m) => { seen.out.push(m) }, onStderr: (m) => { seen.err.push(m) }, onResult: (r) => { seen.results.push(r) }, onError: (e) => { seen.errors.push(e) },
  })
  assert.ok(run instanceof Execution)
  assert.equal(run.text, '42')
  assert.equal(run.error, undefined)
  assert.equal(run.executionCount, 1)
  assert.deepEqual([run.logs.stdout.join(''), run.logs.stderr.join('')], ['héllo b\n', 'err\n'])
  assert.deepEqual([seen.out.map(String).join(''), seen.err.map(String).join('')], ['héllo b\n', 'err\n'])
  assert.ok(seen.out[0] instanceof OutputMessage && !seen.out[0].error && seen.err[0].error)
  assert.ok(seen.out[0].timestamp > 1.6e18)
  assert.ok(seen.results[0] instanceof Result && seen.results[0].isMainResult)
  assert.deepEqual(seen.results[0].formats(), ['text'])
  assert.deepEqual(seen.errors, [])

  // Variables stay, also for another client.
  assert.equal((await sandbox.runCode('x + 1')).text, '21')
  const other = await Sandbox.connect(sandbox.sandboxId)
  assert.equal((await other.runCode('x')).text, '20')
  assert.equal((await sandbox.runCode('print("x" in globals())', { stateless: true })).logs.stdout.join(''), 'False\n')

  const failed = await sandbox.runCode('print("before")\n1/0', { onError: (e) => { seen.errors.push(e) } })
  assert.equal(failed.error.name, 'ZeroDivisionError')
  assert.equal(failed.error.value, 'division by zero')
  assert.match(failed.error.traceback, /line 2/)
  assert.equal(failed.logs.stdout.join(''), 'before\n')
  assert.equal(seen.errors[0], failed.error)
  assert.equal(JSON.parse(JSON.stringify(failed)).error.name, 'ZeroDivisionError')

  const rich = await sandbox.runCode(`class R:
    def _repr_html_(self): return '<b>x</b>'
    def _repr_png_(self): return b'\\x89PNG'
    def __repr__(self): return 'plain'
R()`)
  assert.deepEqual([rich.results[0].html, Buffer.from(rich.results[0].png ?? '', 'base64').toString('latin1'), rich.text], ['<b>x</b>', '\x89PNG', 'plain'])
})

test('libraries', async () => {
  // A script instead of the package manager: code.TestTable has real ones.
  await sandbox.commands.run(`mkdir -p /usr/local/bin /srv/lib && cat >/usr/local/bin/uv <<'end'
#!/bin/sh
for name; do :; done
if [ "$name" = none ]; then echo "no $name here" >&2; exit 5; fi
echo "args = '$*'" >"/srv/lib/$name.py"
end
chmod +x /usr/local/bin/uv`)
  const run = await sandbox.runCode('import sys; sys.path.insert(0, "/srv/lib"); kept = 1\nimport lib1\nlib1.args', { libraries: ['lib1'], request: { library_dir: '/srv' } })
  assert.match(run.text ?? String(run.error?.traceback), /^pip install .*--find-links \/srv -- lib1$/)
  await assert.rejects(sandbox.runCode('kept = 2', { libraries: ['none'] }), /no none here/)
  const alone = await sandbox.runCode('import sys; sys.path.insert(0, "/srv/lib")\nimport lib2\nprint(lib2.args)', { libraries: ['lib2'], stateless: true })
  assert.match(alone.logs.stdout.join(''), /^pip install .* -- lib2\n$/)
  assert.equal((await sandbox.runCode('kept')).text, '1')
})

test('contexts', async () => {
  const context = await sandbox.createCodeContext({ cwd: '/tmp', envs: { C: 'ontext' } })
  assert.deepEqual([context.language, context.cwd], ['python', '/tmp'])
  assert.ok((await sandbox.listCodeContexts()).some((c) => c.id === context.id))
  assert.equal((await sandbox.runCode('import os; y = 5; os.getcwd() + os.environ["C"]', { context })).text, '/tmpontext')
  assert.equal((await sandbox.runCode('y', { context: context.id })).text, '5')
  assert.equal((await sandbox.runCode('y')).error.name, 'NameError')
  let begin
  const begun = new Promise((resolve) => { begin = resolve })
  const long = sandbox.runCode('import threading\nprint("begun", flush=True)\nthreading.Event().wait()', { context, onStdout: begin })
  await begun
  await sandbox.interruptCodeContext(context)
  assert.equal((await long).error.name, 'KeyboardInterrupt')
  assert.equal((await sandbox.runCode('y', { context })).text, '5')
  await sandbox.restartCodeContext(context)
  assert.equal((await sandbox.runCode('y', { context })).error.name, 'NameError')
  await sandbox.removeCodeContext(context)
  await assert.rejects(sandbox.runCode('1', { context }), NotFoundError)
  // The shared one is made anew.
  const [shared] = await sandbox.listCodeContexts()
  await sandbox.removeCodeContext(shared)
  assert.equal((await sandbox.runCode('2 + 2')).text, '4')
})

test('other languages and bad requests', async () => {
  const languages = await sandbox.languages()
  assert.ok(['python', 'bash', 'javascript'].every((name) => languages.some((l) => l.name === name)))
  const bash = await sandbox.runCode('echo "$B"; exit 3', { language: 'bash', envs: { B: 'ash' }, stateless: true })
  assert.deepEqual([bash.logs.stdout.join(''), bash.exitCode], ['ash\n', 3])
  await assert.rejects(sandbox.runCode('x', { language: 'cobol' }), InvalidArgumentError)
  await assert.rejects(sandbox.runCode('x', { language: 'python', context: 'c' }), InvalidArgumentError)
  await assert.rejects(sandbox.runCode('', { stateless: true }), InvalidArgumentError)
})

test('the end of a run', async () => {
  const endless = 'import threading\nprint("begun", flush=True)\nthreading.Event().wait()'
  for (const stateless of [true, false]) {
    const { result } = await timedOut((timeoutMs) => sandbox.runCode(endless, { stateless, timeoutMs }), (result) => result.logs.stdout.join(''))
    assert.equal(result.logs.stdout.join(''), 'begun\n')
    const stop = new AbortController()
    const reason = new Error('stop')
    await assert.rejects(sandbox.runCode(endless, { stateless, signal: stop.signal, onStdout: () => { stop.abort(reason) } }), reason)
    const wrong = new Error('wrong')
    await assert.rejects(sandbox.runCode(endless, { stateless, onStdout: () => { throw wrong } }), wrong)
    assert.equal((await sandbox.runCode('print(1)', { stateless })).logs.stdout.join(''), '1\n')
  }
})
