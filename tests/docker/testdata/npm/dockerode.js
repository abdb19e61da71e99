// Calls of dockerode as programs make them. Each step prints a line of JSON, which the test judges.
'use strict';
const { PassThrough } = require('node:stream');
const Docker = require('dockerode');
const tar = require('tar-fs');
const fs = require('node:fs');
const path = require('node:path');

const docker = new Docker(); // of DOCKER_HOST
const IMAGE = 'tool:1';
const PULLED = process.env.REGISTRY + '/tool:1';

const tell = (step, value) => console.log(JSON.stringify({ step, value }));

// failure returns the status and the message of a call that must not succeed.
async function failure(call) {
  try {
    await call;
  } catch (e) {
    return [e.statusCode, String(e.json?.message ?? e.message).trim()];
  }
  return 'no error';
}

// text reads a stream to its end.
function text(stream) {
  return new Promise((resolve, reject) => {
    const all = [];
    stream.on('data', (d) => all.push(d)).on('error', reject).on('end', () => resolve(Buffer.concat(all).toString()));
  });
}

// split reads both outputs of a framed stream to their end.
async function split(stream) {
  const out = new PassThrough(), err = new PassThrough();
  docker.modem.demuxStream(stream, out, err);
  const both = Promise.all([text(out), text(err)]);
  stream.on('end', () => { out.end(); err.end(); });
  return both;
}

// found resolves when a stream has brought a text.
function found(stream, want) {
  return new Promise((resolve, reject) => {
    let all = '';
    stream.on('data', (d) => { all += d; if (all.includes(want)) resolve(all); }).on('error', reject).on('end', () => reject(new Error(`${JSON.stringify(all)} ends without ${want}`)));
  });
}

const progress = (stream) => new Promise((resolve, reject) => docker.modem.followProgress(stream, (err, all) => (err ? reject(err) : resolve(all))));

async function run(container, opts, input) {
  const stream = await container.attach({ stream: true, stdin: input !== undefined, stdout: true, stderr: true, hijack: true, ...opts });
  const ended = container.wait({ condition: 'next-exit' });
  const output = split(stream);
  await container.start();
  if (input !== undefined) {
    stream.end(input); // half-closes
  }
  return [...(await output), (await ended).StatusCode];
}

async function exec(container, opts, input) {
  const made = await container.exec({ AttachStdout: true, AttachStderr: true, AttachStdin: input !== undefined, ...opts });
  const stream = await made.start({ hijack: true, stdin: input !== undefined });
  const output = split(stream);
  if (input !== undefined) {
    stream.end(input);
  }
  const both = await output;
  return [...both, (await made.inspect()).ExitCode];
}

async function main() {
  tell('ping', (await docker.ping()).toString());
  tell('version', (await docker.version()).ApiVersion);
  tell('info', (await docker.info()).OSType);
  tell('auth', (await docker.checkAuth({ username: 'u', password: 'p', serveraddress: process.env.REGISTRY })).Status);

  const lines = await progress(await docker.pull(PULLED));
  tell('pull', lines.at(-1).status);
  tell('pull of nothing', await failure(docker.pull(process.env.REGISTRY + '/nosuch:1').then(progress)));
  tell('inspect of an image', (await docker.getImage(PULLED).inspect()).RepoTags.includes(PULLED));
  tell('images', (await docker.listImages({ filters: { reference: [IMAGE] } })).map((i) => i.RepoTags[0]));
  await docker.getImage(IMAGE).tag({ repo: 'other', tag: '2' });
  tell('tag', (await docker.getImage('other:2').history()).length > 0);
  tell('untag', (await docker.getImage('other:2').remove())[0]);

  const events = await docker.getEvents({ filters: { type: ['container'], container: ['agent'], event: ['create', 'start', 'die', 'destroy'] } });
  const destroyed = found(events, '"destroy"').then((all) => all.trim().split('\n').map((l) => JSON.parse(l).Action));

  // run, as the library's own
  const out = new PassThrough(), err = new PassThrough();
  const outputs = Promise.all([text(out), text(err)]);
  const [result, ran] = await docker.run(IMAGE, ['sh', '-c', 'echo out; echo err >&2; exit 3'], [out, err], { Tty: false });
  out.end(); err.end();
  tell('run', [...(await outputs), result.StatusCode]);
  await ran.remove();

  // stdin, which is half-closed
  const stdin = { OpenStdin: true, StdinOnce: true, AttachStdin: true, AttachStdout: true, AttachStderr: true };
  let c = await docker.createContainer({ Image: IMAGE, Cmd: ['cat'], ...stdin });
  tell('attach', await run(c, {}, 'over\nand out\n'));
  await c.remove();
  c = await docker.createContainer({ Image: IMAGE, Cmd: ['sh', '-c', 'md5sum; echo end >&2'], ...stdin });
  tell('attach with much input', await run(c, {}, Buffer.alloc(3 << 20, 'x')));
  await c.remove();
  c = await docker.createContainer({ Image: IMAGE, Cmd: ['sh', '-c', 'cat; echo end >&2; exit 4'], ...stdin });
  tell('attach without an upgrade', await (async () => {
    const stream = await c.attach({ stream: true, stdin: true, stdout: true, stderr: true });
    const output = split(stream);
    const ended = c.wait({ condition: 'next-exit' });
    await c.start();
    stream.write('raw\n');
    stream.req.socket.end();
    return [...(await output), (await ended).StatusCode];
  })());
  await c.remove();
  // a terminal
  c = await docker.createContainer({ Image: IMAGE, Cmd: ['sh'], Tty: true, OpenStdin: true, AttachStdin: true, AttachStdout: true });
  const terminal = await c.attach({ stream: true, stdin: true, stdout: true, hijack: true });
  await c.start();
  await c.resize({ h: 33, w: 77 });
  const size = found(terminal, '33 77');
  terminal.write('stty size\n');
  tell('terminal', (await size).includes('33 77\r\n'));
  const left = c.wait();
  terminal.write('exit 6\n');
  tell('exit of a terminal', (await left).StatusCode);
  await c.remove();

  // an agent's container
  tell('container without an image', await failure(docker.createContainer({ Image: 'nosuch:1' })));
  const agent = await docker.createContainer({
    name: 'agent', Image: IMAGE, Cmd: ['sh', '-c', 'mkfifo /tmp/go 2>/dev/null; echo begun; while read -r l; do echo "$l"; test "$l" = end && exit 5; done <>/tmp/go'], Env: ['A=b'], Labels: { app: 'shop' },
    WorkingDir: '/work', HostConfig: { Ulimits: [{ Name: 'nofile', Soft: 123, Hard: 123 }] },
  });
  tell('inspect before the start', (await agent.inspect()).State.Status);
  const first = agent.wait({ condition: 'next-exit' }); // not that of a container whose files are used
  tell('put before the start', await putFiles(agent, { 'before.txt': 'early\n' }, '/work'));
  await agent.start();
  tell('start again', await failure(agent.start()));
  const state = await agent.inspect();
  tell('inspect', [state.Name, state.State.Running, state.Config.Env.includes('A=b'), state.Config.WorkingDir, state.HostConfig.Ulimits]);
  tell('list', (await docker.listContainers({ filters: { label: ['app=shop'] } })).map((i) => [i.Names, i.State]));
  const logs = await agent.logs({ follow: true, stdout: true, stderr: true });
  const followed = split(logs);

  tell('exec', await exec(agent, { Cmd: ['sh', '-c', 'cat before.txt; echo $A >&2; exit 9'] }));
  tell('exec with input', await exec(agent, { Cmd: ['wc', '-c'] }, Buffer.alloc(1 << 20)));
  tell('exec as a user', (await exec(agent, { Cmd: ['id', '-u'], User: '1000' }))[0]);
  tell('exec of nothing', (await exec(agent, { Cmd: ['nosuch'] }))[2]);
  const many = await Promise.all([...Array(16).keys()].map((n) => exec(agent, { Cmd: ['echo', String(n)] })));
  tell('execs at once', many.map((m) => m[0].trim()).join());
  const tty = await agent.exec({ Cmd: ['sh', '-c', 'read x; stty size'], AttachStdin: true, AttachStdout: true, Tty: true });
  const stream = await tty.start({ hijack: true, stdin: true, Tty: true });
  await tty.resize({ h: 20, w: 60 });
  const answer = text(stream);
  stream.write('\n');
  tell('exec with a terminal', (await answer).endsWith('20 60\r\n'));
  const detached = await agent.exec({ Cmd: ['touch', '/work/detached'] });
  await text(await detached.start({ Detach: true }));
  const seen = async () => (await exec(agent, { Cmd: ['test', '-e', '/work/detached'] }))[2] === 0;
  while (!(await seen()));
  tell('exec that is detached', true);

  const stats = await agent.stats({ stream: false });
  tell('stats', [stats.name, stats.pids_stats.current > 0, stats.memory_stats.usage > 0]);
  const flow = await agent.stats({ stream: true });
  tell('stats as a stream', JSON.parse((await found(flow, '\n')).split('\n')[0]).name);
  flow.destroy();
  const top = await agent.top({ ps_args: '-ef' });
  tell('top', [top.Titles.includes('PID'), top.Processes.some((p) => p.join(' ').includes('while read'))]);

  tell('put', await putFiles(agent, { 'a.txt': 'text', 'sub/b.txt': 'more' }, '/work'));
  tell('get', await getFiles(agent, '/work/sub'));
  const head = await agent.infoArchive({ path: '/work/a.txt' });
  tell('head', JSON.parse(Buffer.from(head.headers['x-docker-container-path-stat'], 'base64')).size);
  tell('get nothing', (await failure(agent.getArchive({ path: '/nosuch' })))[0]);
  tell('changes', (await agent.changes()).some((e) => e.Path === '/work/a.txt' && e.Kind === 1));
  const kept = await agent.commit({ repo: 'kept', tag: '1', comment: 'by dockerode', changes: 'CMD ["cat", "/work/a.txt"]' });
  tell('commit', /^sha256:[0-9a-f]{64}$/.test(kept.Id));
  c = await docker.createContainer({ Image: 'kept:1', AttachStdout: true });
  tell('run of what was committed', await run(c, {}));
  await c.remove();

  await agent.pause();
  tell('exec when paused', await failure(agent.exec({ Cmd: ['true'] })));
  await agent.unpause();
  await agent.rename({ name: 'agent2' });
  await agent.rename({ name: 'agent' });
  tell('update', ((await agent.update({ RestartPolicy: { Name: 'no' } })).Warnings ?? []).length);
  tell('remove when it runs', await failure(agent.remove()));
  await exec(agent, { Cmd: ['sh', '-c', 'until test -p /tmp/go; do :; done; printf "one\\nend\\n" >/tmp/go'] });
  tell('wait', await first);
  tell('logs that are followed', await followed);
  tell('logs', await agent.logs({ stdout: true, stderr: true, tail: 2 }).then((b) => b.toString('latin1')));
  await agent.start();
  await agent.stop({ t: 1 });
  tell('stop again', await failure(agent.stop()));
  await agent.restart();
  await agent.kill({ signal: 'KILL' });
  await agent.wait();
  tell('exit code', (await agent.inspect()).State.ExitCode);
  tell('export', (await text(await agent.export())).includes('work/a.txt'));
  await agent.remove({ v: true });
  tell('events', (await destroyed).join());
  events.destroy();
  tell('removed', await failure(agent.inspect()));

  // a build, a volume and a network
  const context = fs.mkdtempSync(path.join(process.env.TMPDIR, 'context-'));
  fs.writeFileSync(path.join(context, 'Dockerfile'), 'FROM tool:1\nCOPY word /word\nRUN cat /word >/copy\nCMD ["cat", "/copy"]\n');
  fs.writeFileSync(path.join(context, 'word'), 'built\n');
  const built = await progress(await docker.buildImage({ context, src: ['Dockerfile', 'word'] }, { t: 'built:1' }));
  tell('build', built.some((l) => /Successfully tagged built:1/.test(l.stream)));
  c = await docker.createContainer({ Image: 'built:1', AttachStdout: true });
  tell('run of what was built', await run(c, {}));
  await c.remove();
  fs.writeFileSync(path.join(context, 'Dockerfile'), 'FROM tool:1\nRUN exit 7\n');
  tell('build that fails', (await progress(await docker.buildImage({ context, src: ['Dockerfile', 'word'] }, { t: 'failed:1' }))).at(-1).errorDetail.code);
  fs.rmSync(context, { recursive: true });
  const saved = await docker.getImage('built:1').get();
  const loaded = await progress(await docker.loadImage(saved));
  tell('save and load', loaded.at(-1).stream);
  await docker.getImage('built:1').remove();
  await docker.getImage('kept:1').remove();

  const volume = await docker.createVolume({ Name: 'data', Labels: { app: 'shop' } });
  c = await docker.createContainer({ Image: IMAGE, Cmd: ['sh', '-c', 'echo kept >/data/f'], HostConfig: { Binds: ['data:/data'] } });
  await run(c, {});
  await c.remove();
  tell('volumes', (await docker.listVolumes({ filters: { label: ['app=shop'] } })).Volumes.map((v) => v.Name));
  const network = await docker.createNetwork({ Name: 'front', CheckDuplicate: true });
  const server = await docker.createContainer({
    name: 'server', Image: IMAGE, Cmd: ['busybox', 'httpd', '-f', '-p', '8080', '-h', '/data'], HostConfig: { NetworkMode: 'front', Binds: ['data:/data:ro'] },
    NetworkingConfig: { EndpointsConfig: { front: { Aliases: ['web'] } } },
  });
  await server.start();
  c = await docker.createContainer({ Image: IMAGE, Cmd: ['sh', '-c', 'until busybox wget -qO- http://web:8080/f; do :; done 2>/dev/null'], HostConfig: { NetworkMode: 'front' } });
  tell('name in a network', await run(c, {}));
  await c.remove();
  tell('members', Object.values((await network.inspect()).Containers).map((m) => m.Name));
  tell('network in use', (await failure(network.remove()))[0]);
  tell('volume in use', (await failure(volume.remove()))[0]);
  await server.remove({ force: true });
  await network.remove();
  await volume.remove();
  tell('refused', await failure(docker.createContainer({ Image: IMAGE, HostConfig: { Privileged: true } })));
  tell('swarm', (await failure(docker.listServices()))[0]);
  tell('prune', (await docker.pruneContainers()).SpaceReclaimed);
  tell('disk usage', (await docker.df()).Images.length > 0);
  tell('left', (await docker.listContainers({ all: true })).length);
}

async function putFiles(container, files, where) {
  const dir = fs.mkdtempSync(path.join(process.env.TMPDIR, 'put-'));
  for (const [name, data] of Object.entries(files)) {
    fs.mkdirSync(path.dirname(path.join(dir, name)), { recursive: true });
    fs.writeFileSync(path.join(dir, name), data);
  }
  await container.putArchive(tar.pack(dir), { path: where });
  fs.rmSync(dir, { recursive: true });
  return Object.keys(files);
}

async function getFiles(container, from) {
  const dir = fs.mkdtempSync(path.join(process.env.TMPDIR, 'get-'));
  const stream = await container.getArchive({ path: from });
  await new Promise((resolve, reject) => stream.pipe(tar.extract(dir)).on('finish', resolve).on('error', reject));
  const all = {};
  for (const name of fs.readdirSync(dir, { recursive: true })) {
    if (fs.statSync(path.join(dir, name)).isFile()) {
      all[name] = fs.readFileSync(path.join(dir, name), 'utf8');
    }
  }
  fs.rmSync(dir, { recursive: true });
  return all;
}

main().then(() => process.exit(0), (e) => { console.error(e); process.exit(1); });
