// Checks of a server, by the protocol's own TypeScript SDK. Each prints a line.
//
//   node client.mjs stdio PROGRAM [ARG]...
//   node client.mjs http URL TOKEN
import assert from 'node:assert/strict'
import { Client } from '@modelcontextprotocol/sdk/client/index.js'
import { StdioClientTransport } from '@modelcontextprotocol/sdk/client/stdio.js'
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js'

const [kind, first, ...rest] = process.argv.slice(2)
const network = process.env.NETWORK // of the sandboxes: none, or one whose ports are reachable

const transport = () => kind === 'stdio'
  ? new StdioClientTransport({ command: first, args: rest, stderr: 'inherit', env: process.env })
  : new StreamableHTTPClientTransport(new URL(first), { requestInit: { headers: { Authorization: `Bearer ${rest[0]}` } } })

const client = new Client({ name: 'checks', version: '1' })
const connection = transport()
await client.connect(connection)

const call = (name, args = {}, options) => client.callTool({ name, arguments: args }, undefined, options)
const ok = async (name, args, options) => {
  const r = await call(name, args, options)
  assert.ok(!r.isError, `${name}: ${JSON.stringify(r.content)}`)
  return r.structuredContent
}
const refused = async (name, args, why) => {
  const r = await call(name, args)
  assert.ok(r.isError, `${name} ${JSON.stringify(args)} was accepted`)
  const text = r.content.map((c) => c.text).join('')
  assert.match(text, why)
  assert.doesNotMatch(text, /\/tmp\/|\/var\/lib|\.sock/, 'an error names a path of the host')
}
const check = async (name, f) => {
  await f()
  console.log('ok', name)
}

const png = 'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=='

const tools = Object.fromEntries((await client.listTools()).tools.map((t) => [t.name, t]))
await check('tools', () => {
  assert.deepEqual(Object.keys(tools).sort(), ['command_kill', 'command_output', 'file_edit', 'file_list', 'file_read', 'file_write', 'get_url',
    'languages', 'run_code', 'run_command', 'sandbox_create', 'sandbox_fork', 'sandbox_kill', 'sandbox_list', 'sandbox_pause', 'sandbox_resume', 'sandbox_snapshot',
    'snapshot_delete', 'snapshot_list'])
  for (const t of Object.values(tools)) {
    assert.ok(t.description && t.inputSchema && t.outputSchema && t.annotations.title, t.name)
  }
  assert.equal(tools.file_read.annotations.readOnlyHint, true)
  assert.equal(tools.sandbox_kill.annotations.destructiveHint, true)
  assert.equal(tools.sandbox_kill.annotations.idempotentHint, true)
  assert.equal(tools.file_list.annotations.openWorldHint, false)
  assert.equal(tools.run_command.annotations.readOnlyHint, false)
})
if (process.env.VERSION) assert.equal(client.getServerVersion().version, process.env.VERSION)
await check('instructions', () => assert.match(client.getInstructions(), /sandbox/))
await check('no sandbox yet', async () => assert.deepEqual((await ok('sandbox_list')).sandboxes, []))

await check('command', async () => {
  const r = await call('run_command', { command: 'echo out; echo err >&2; exit 3' })
  assert.deepEqual({ ...r.structuredContent, duration_ms: 0 }, { stdout: 'out\n', stderr: 'err\n', exit_code: 3, duration_ms: 0 })
  assert.equal(r.content[0].text, 'out\n[stderr]\nerr\n[exit code 3]')
})
await check('argv, env, stdin, cwd', async () => {
  const r = await ok('run_command', { argv: ['sh', '-c', 'cat; echo "$GREETING $PWD"'], env: { GREETING: 'hello' }, stdin: 'in\n', cwd: '/tmp' })
  assert.equal(r.stdout, 'in\nhello /tmp\n')
})
await check('one sandbox', async () => {
  const list = (await ok('sandbox_list')).sandboxes
  assert.equal(list.length, 1)
  assert.equal(list[0].default, true)
  assert.equal(list[0].network, network)
})
await check('timeout', async () => {
  let r = { stdout: '' }
  for (let timeout = 0.5; r.stdout === '' && timeout < 540; timeout *= 2) { // a start that takes longer is no fault
    r = await ok('run_command', { command: 'echo before; sleep 600', timeout }, { timeout: 500000 })
    assert.equal(r.timed_out, true)
  }
  assert.equal(r.stdout, 'before\n')
})
await check('long output', async () => {
  const r = await ok('run_command', { command: 'echo first; yes | head -c 1000000; echo last' })
  assert.equal(r.truncated, true)
  assert.ok(r.stdout.length < 70000)
  assert.match(r.stdout, /^first\n/)
  assert.match(r.stdout, /last\n$/)
  assert.match(r.stdout, /\d+ bytes are left out/)
})
await check('not UTF-8', async () => {
  const r = await ok('run_command', { command: "printf 'a\\377b'" })
  assert.equal(r.stdout, 'a\uFFFDb')
})
await check('missing program', () => refused('run_command', { argv: ['no-such-program'] }, /no-such-program/))
await check('progress', async () => {
  const seen = []
  let more
  const enough = new Promise((resolve) => { more = resolve })
  const running = ok('run_command', { command: 'echo working; while [ ! -e /tmp/go ]; do sleep 0.1; done' }, {
    timeout: 500000, resetTimeoutOnProgress: true,
    onprogress: (p) => { seen.push(p); if (seen.length === 2) more() }
  })
  await enough
  await ok('file_write', { path: '/tmp/go', content: '' })
  await running
  assert.ok(seen[1].progress > seen[0].progress)
  assert.equal(seen[1].message, 'working')
})
await check('cancellation', async () => {
  const abort = new AbortController()
  const running = call('run_command', { command: 'exec sleep 31536000' }, { signal: abort.signal, timeout: 500000 })
  const count = async () => (await ok('run_command', { command: "grep -lz '^31536000$' /proc/[0-9]*/cmdline | wc -l" })).stdout.trim()
  while (await count() === '0');
  abort.abort('enough')
  await assert.rejects(running)
  while (await count() !== '0');
})
if (process.env.GIVEN) {
  assert.equal((await ok('run_code', { language: 'bash', code: 'echo $GIVEN' })).stdout, process.env.GIVEN + '\n')
}
const python = (await ok('run_command', { command: 'command -v python3 || true' })).stdout !== ''
await check('languages', async () => {
  const { languages } = await ok('languages')
  assert.deepEqual(languages.filter((l) => l.keeps_variables).map((l) => l.name), ['bash', 'javascript', 'python', 'r', 'ruby', 'typescript'])
  assert.equal(tools.languages.annotations.readOnlyHint, true)
  assert.equal(tools.run_code.annotations.destructiveHint, true)
})
await check('code', async () => {
  await ok('run_code', { code: 'x=6; cd /tmp', language: 'bash' })
  assert.equal((await ok('run_code', { code: 'echo $((x * 7)) $PWD', language: 'sh' })).stdout, '42 /tmp\n')
  assert.equal((await ok('run_code', { code: 'echo $x.', language: 'bash', context: 'mine' })).stdout, '.\n')
  assert.equal((await ok('run_code', { code: 'echo $x.', language: 'bash', fresh: true })).stdout, '.\n')
  assert.equal((await call('run_code', { code: 'exit 3', language: 'bash' })).isError, true)
  await refused('run_code', { code: 'x', language: 'cobol' }, /python/)
})
await check('code with libraries', async () => {
  if (!python) return
  // A script instead of the package manager: code.TestTable has real ones.
  await ok('run_command', { command: `mkdir -p /usr/local/bin /srv/lib && cat >/usr/local/bin/uv <<'end'
#!/bin/sh
for name; do :; done
if [ "$name" = none ]; then echo "no $name here" >&2; exit 5; fi
echo "args = '$*'" >"/srv/lib/$name.py"
end
chmod +x /usr/local/bin/uv` })
  const code = 'import sys; sys.path.insert(0, "/srv/lib"); kept = 1\nimport lib1\nprint(lib1.args)'
  assert.match((await ok('run_code', { code, libraries: ['lib1'] })).stdout, /^pip install .* -- lib1\n$/)
  await refused('run_code', { code: 'kept = 2', libraries: ['none'] }, /no none here/)
  assert.match((await ok('run_code', { code: 'import lib2\nprint(kept, lib2.args)', libraries: ['lib2>=1', 'lib2'] })).stdout, /^1 pip install .* -- lib2>=1 lib2\n$/)
})
await check('code with values', async () => {
  if (!python) return
  const r = await call('run_code', { code: `import base64\nclass P:\n  def _repr_png_(self): return base64.b64decode('${png}')\ndisplay(P())\n6 * 7` })
  assert.deepEqual(r.content[1], { type: 'image', data: png, mimeType: 'image/png' })
  assert.equal(r.content[0].text, '42\n[exit code 0]')
  assert.deepEqual(r.structuredContent.results.map((v) => [v.images ?? [], v.is_main_result ?? false]), [[['image/png'], false], [[], true]])
  await refused('run_code', { code: 'def f():\n  raise ValueError("why")\nf()' }, /line 2, in f[^]*ValueError: why/)
})
await check('code with progress', async () => {
  const message = await new Promise((resolve, reject) => {
    call('run_code', { language: 'bash', code: 'echo one; echo two; while [ ! -e /tmp/on ]; do sleep 0.1; done' }, {
      timeout: 500000, resetTimeoutOnProgress: true,
      onprogress: async (p) => {
        if (!p.message) return
        await ok('file_write', { path: '/tmp/on', content: '' })
        resolve(p.message)
      }
    }).catch(reject)
  })
  assert.match(message, /^one\n(two\n)?$/)
})
await check('cancelled code', async () => {
  const abort = new AbortController()
  const running = call('run_code', { language: 'bash', code: 'kept=1; touch /tmp/run; sleep 31536000' }, { signal: abort.signal, timeout: 500000 })
  while ((await ok('run_command', { command: '[ -e /tmp/run ]' })).exit_code !== 0);
  abort.abort('enough')
  await assert.rejects(running)
  assert.equal((await ok('run_code', { language: 'bash', code: 'echo $kept' }, { timeout: 500000 })).stdout, '1\n')
})
await check('background', async () => {
  await ok('run_command', { command: 'mkfifo /tmp/fifo' })
  const started = await ok('run_command', { command: 'echo one; read line < /tmp/fifo; echo $line; exit 5', background: true })
  assert.equal(started.running, true)
  let out = await ok('command_output', { id: started.id })
  while (out.stdout === '') out = await ok('command_output', { id: started.id })
  assert.equal(out.stdout, 'one\n')
  assert.equal(out.running, true)
  await ok('run_command', { command: 'echo two > /tmp/fifo' })
  out = await ok('command_output', { id: started.id, offset: out.offset, wait: 50 })
  assert.deepEqual([out.stdout, out.exit_code], ['two\n', 5])
  const killed = await ok('run_command', { command: 'exec sleep 31536000', background: true })
  await ok('command_kill', { id: killed.id })
  out = await ok('command_output', { id: killed.id, wait: 50 })
  assert.equal(out.signal, 'SIGKILL')
})
await check('background output from an offset', async () => {
  const started = await ok('run_command', { command: 'printf 0123456789', background: true })
  const all = await ok('command_output', { id: started.id, wait: 50 })
  assert.deepEqual([all.stdout, all.exit_code, all.offset], ['0123456789', 0, 10])
  assert.equal((await ok('command_output', { id: started.id, offset: 4 })).stdout, '456789')
})
await check('files', async () => {
  assert.deepEqual(await ok('file_write', { path: 'dir/notes.txt', content: 'alpha\nbeta\nbeta\n' }), { path: '/dir/notes.txt', bytes: 16 })
  const r = await call('file_read', { path: 'dir/notes.txt' })
  assert.equal(r.content[0].text, 'alpha\nbeta\nbeta\n')
  assert.equal((await call('file_read', { path: '/dir/notes.txt', offset: 6, length: 4 })).structuredContent.more, true)
  await ok('file_write', { path: '/dir/notes.txt', content: 'Z2FtbWEK', encoding: 'base64', append: true })
  assert.equal((await ok('run_command', { command: 'cat /dir/notes.txt' })).stdout, 'alpha\nbeta\nbeta\ngamma\n')
})
await check('edit', async () => {
  await ok('run_command', { command: 'chmod 0750 /dir/notes.txt' })
  await ok('file_edit', { path: '/dir/notes.txt', old_text: 'alpha\n', new_text: 'first $1 \\1\n' })
  await refused('file_edit', { path: '/dir/notes.txt', old_text: 'beta', new_text: 'x' }, /occurs 2 times/)
  await refused('file_edit', { path: '/dir/notes.txt', old_text: 'delta', new_text: 'x' }, /does not occur/)
  assert.equal((await ok('file_edit', { path: '/dir/notes.txt', old_text: 'beta', new_text: 'x', replace_all: true })).replacements, 2)
  assert.equal((await ok('run_command', { command: 'cat /dir/notes.txt; stat -c %a /dir/notes.txt' })).stdout, 'first $1 \\1\nx\nx\ngamma\n750\n')
})
await check('edit through a link', async () => {
  await ok('run_command', { command: 'ln -s notes.txt /dir/link' })
  await ok('file_edit', { path: '/dir/link', old_text: 'gamma', new_text: 'delta' })
  assert.equal((await ok('run_command', { command: 'readlink /dir/link; tail -n 1 /dir/notes.txt' })).stdout, 'notes.txt\ndelta\n')
})
await check('list', async () => {
  const { entries } = await ok('file_list', { path: '/dir' })
  assert.deepEqual(entries.map((e) => [e.path, e.type]), [['/dir/link', 'symlink'], ['/dir/notes.txt', 'file']])
})
await check('image', async () => {
  await ok('file_write', { path: '/plot.png', content: png, encoding: 'base64' })
  const r = await call('file_read', { path: '/plot.png' })
  assert.deepEqual(r.content, [{ type: 'image', data: png, mimeType: 'image/png' }])
})
await check('binary', async () => {
  await ok('file_write', { path: '/data.bin', content: 'AAECAw==', encoding: 'base64' })
  await refused('file_read', { path: '/data.bin' }, /no text/)
})
await check('resources', async () => {
  const { resourceTemplates } = await client.listResourceTemplates()
  assert.equal(resourceTemplates[0].uriTemplate, 'sandbox://{sandbox}/{+path}')
  const [text] = (await client.readResource({ uri: 'sandbox://default/dir/notes.txt' })).contents
  assert.match(text.text, /first/)
  const [blob] = (await client.readResource({ uri: 'sandbox://default/data.bin' })).contents
  assert.equal(blob.blob, 'AAECAw==')
  for (const uri of ['sandbox://default/missing', 'sandbox://other/etc/passwd', 'file:///etc/passwd', 'sandbox://default/%00', 'sandbox://default/dir/../../../etc/shadow-no']) {
    await assert.rejects(client.readResource({ uri }), (e) => e.code < 0 || true, uri)
  }
})
await check('path tricks', async () => {
  const host = (await ok('file_list', { path: '../../../..' })).entries.map((e) => e.path)
  assert.ok(host.includes('/plot.png'), 'the root is the sandbox\'s')
  await refused('file_read', { path: '/proc/1/root/../../etc/nothing-here' }, /./)
  await refused('file_read', { path: 'a\u0000b' }, /NUL/)
  await refused('file_write', { path: '/x'.repeat(5000), content: '' }, /longer/)
  await refused('file_read', { path: '' }, /missing/)
})
await check('snapshot and fork', async () => {
  const snap = await ok('sandbox_snapshot', { name: `mcp-${process.pid}-${kind}`, comment: 'kept' })
  assert.ok((await ok('snapshot_list')).snapshots.some((s) => s.id === snap.id))
  const again = await ok('sandbox_create', { snapshot: snap.name })
  assert.equal((await ok('run_command', { sandbox: again.id, command: 'cat /dir/link' })).exit_code, 0)
  const fork = await ok('sandbox_fork', { sandbox: again.name })
  await ok('file_write', { sandbox: fork.id, path: '/only', content: '' })
  await refused('file_read', { sandbox: again.id, path: '/only' }, /only/)
  assert.equal((await ok('snapshot_list')).snapshots.length, 1)
  await ok('snapshot_delete', { snapshot: snap.id })
  await ok('sandbox_kill', { sandbox: fork.id })
  await refused('sandbox_kill', { sandbox: fork.id }, /no sandbox/)
  await ok('sandbox_kill', { sandbox: again.id })
})
await check('pause', async () => {
  assert.equal((await ok('sandbox_pause')).state, 'paused')
  assert.equal((await ok('sandbox_pause')).state, 'paused')
  assert.equal((await ok('sandbox_resume')).state, 'running')
})
await check('ceilings', async () => {
  await refused('sandbox_create', { image: 'registry.invalid/secret:1' }, /not allowed/)
  await refused('sandbox_create', { network: 'full' }, /operator/)
  await refused('sandbox_create', { memory_mb: 512 }, /operator/)
  await refused('sandbox_create', { cpus: 3 }, /operator/)
  await refused('sandbox_create', { snapshot: 'of-another' }, /no snapshot/)
  await refused('sandbox_create', { profile: 'loose' }, /additional|unexpected/i)
  await refused('sandbox_create', { mounts: [] }, /additional|unexpected/i)
  await refused('run_command', { command: 'true', timeout: 100000 }, /at most/)
  await refused('run_command', { command: 'true', sandbox: 'neighbour' }, /no sandbox/)
})
await check('wrong arguments', async () => {
  await refused('run_command', {}, /either/)
  await refused('run_command', { command: 'a', argv: ['b'] }, /either/)
  await refused('run_command', { command: 7 }, /./)
  await refused('run_command', { command: 'true', timeout: -1 }, /timeout/)
  await refused('run_command', { command: 'true', env: { 'A=B': 'c' } }, /env/)
  await refused('run_command', { command: 'x'.repeat(200000) }, /more than/)
  await refused('file_write', { path: '/big', content: 'x'.repeat(5 << 20) }, /at most/)
  await refused('file_write', { path: '/y', content: '***', encoding: 'base64' }, /base64/)
  await refused('command_output', { id: 'nothing' }, /nothing/)
  await refused('command_output', { id: '../../x' }, /./)
  await refused('get_url', { port: 70000 }, /port/)
  const unknown = await client.callTool({ name: 'no_such_tool', arguments: {} }).catch((e) => e)
  assert.match(String(unknown.message ?? JSON.stringify(unknown)), /no_such_tool/)
})
await check('many at once', async () => {
  const all = await Promise.all(Array.from({ length: 20 }, (_, i) => ok('run_command', { command: `echo ${i}` })))
  all.forEach((r, i) => assert.equal(r.stdout, `${i}\n`))
})
await check('url', async () => {
  if (network === 'none') return refused('get_url', { port: 8123 }, /network/)
  await ok('file_write', { path: '/www/index.html', content: 'hello' })
  const server = 'exec python3 -m http.server --bind 127.0.0.1 --directory /www 8123'
  const started = await ok('run_command', { command: server, background: true })
  const { url } = await ok('get_url', { port: 8123 })
  const { port, host } = new URL(url)
  const { request } = await import('node:http')
  const get = (headers) => new Promise((resolve, reject) => request({ host: '127.0.0.1', port, headers }, (res) => {
    let body = ''
    res.setEncoding('utf8').on('data', (d) => { body += d }).on('end', () => resolve([res.statusCode, body]))
  }).on('error', reject).end())
  const offline = (await ok('sandbox_create', { network: 'none' })).id
  await refused('get_url', { sandbox: offline, port: 8123 }, /network/)
  await ok('sandbox_kill', { sandbox: offline })
  let answer
  do answer = await get({ host }); while (answer[0] === 502)
  assert.deepEqual(answer, [200, 'hello'])
  assert.equal((await get({ host: '127.0.0.1' }))[0], 404)
  assert.equal((await get({ host: host.replace('8123', '22') }))[0], 404)
  await ok('command_kill', { id: started.id })
})
await check('kill the own sandbox', async () => {
  await ok('sandbox_kill')
  assert.equal((await call('file_read', { path: '/plot.png' })).isError, true) // of a new sandbox
  assert.equal((await ok('sandbox_list')).sandboxes.length, 1)
})
if (process.env.LEAVE) {
  console.log('left', (await ok('sandbox_list')).sandboxes[0].id)
  process.kill(process.pid, 'SIGKILL')
}
if (kind === 'http') await connection.terminateSession()
await client.close()
console.log('done')
