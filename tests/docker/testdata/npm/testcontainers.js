// A test suite's calls of testcontainers. Each step prints a line of JSON, which the test judges.
'use strict';
const { GenericContainer, Network, Wait } = require('testcontainers');
const fs = require('node:fs');
const path = require('node:path');

const IMAGE = 'tool:1';
const SERVER = ['sh', '-c', 'mkdir -p /srv; echo hello >/srv/index.html; echo "it is served"; exec busybox httpd -f -v -p 8080 -h /srv'];

const tell = (step, value) => console.log(JSON.stringify({ step, value }));

async function failure(call) {
  try {
    await call;
  } catch (e) {
    return String(e.message);
  }
  return 'no error';
}

// fetched asks a server until it listens: it says that it serves before that.
async function fetched(container, port, file) {
  for (;;) {
    try {
      const answer = await fetch(`http://${container.getHost()}:${container.getMappedPort(port)}/${file}`);
      return [answer.status, await answer.text()];
    } catch { /* not yet */ }
  }
}

async function main() {
  // every way to wait for a container
  const waits = {
    'listening ports': Wait.forListeningPorts(),
    log: Wait.forLogMessage('it is served'),
    'log by expression': Wait.forLogMessage(/is served$/m),
    http: Wait.forHttp('/index.html', 8080).forStatusCode(200),
    'health check': Wait.forHealthCheck(),
    'successful command': Wait.forSuccessfulCommand('test -s /srv/index.html'),
    all: Wait.forAll([Wait.forListeningPorts(), Wait.forLogMessage('it is served')]),
  };
  for (const [name, wait] of Object.entries(waits)) {
    let make = new GenericContainer(IMAGE).withCommand(SERVER).withExposedPorts(8080).withWaitStrategy(wait);
    if (name === 'health check') {
      make = make.withHealthCheck({ test: ['CMD-SHELL', 'busybox wget -qO- http://127.0.0.1:8080/index.html'], interval: 1000, timeout: 20000, retries: 5 });
    }
    const container = await make.start();
    tell(`wait: ${name}`, await fetched(container, 8080, 'index.html'));
    await container.stop();
  }
  const once = await new GenericContainer(IMAGE).withCommand(['sh', '-c', 'echo done']).withWaitStrategy(Wait.forOneShotStartup()).start();
  tell('wait: one shot', (await once.getId()).length);
  await once.stop();
  tell('exit before the log', await failure(new GenericContainer(IMAGE).withCommand(['sh', '-c', 'echo other; exit 3']).withWaitStrategy(Wait.forLogMessage('never said')).withStartupTimeout(300000).start()));
  tell('missing image', await failure(new GenericContainer(process.env.REGISTRY + '/nosuch:1').start()));

  // a container that is worked with
  const dir = fs.mkdtempSync(path.join(process.env.TMPDIR, 'copied-'));
  fs.writeFileSync(path.join(dir, 'host.txt'), 'of the host\n');
  const pulled = await new GenericContainer(process.env.REGISTRY + '/tool:1')
    .withCommand(SERVER).withExposedPorts(8080).withName('worked').withEnvironment({ A: 'b' }).withLabels({ app: 'shop' })
    .withWorkingDir('/work').withUser('0').withTmpFs({ '/scratch': 'rw,size=1m' }).withUlimits({ nofile: { soft: 123, hard: 123 } }).withSharedMemorySize(32 << 20)
    .withCopyContentToContainer([{ content: 'before\n', target: '/srv/content.txt', mode: 0o640 }])
    .withCopyFilesToContainer([{ source: path.join(dir, 'host.txt'), target: '/srv/file.txt' }])
    .withCopyDirectoriesToContainer([{ source: dir, target: '/srv/dir' }])
    .withWaitStrategy(Wait.forListeningPorts()).start().catch((e) => { console.error(e); process.exit(1); });
  tell('pulled', [pulled.getName(), pulled.getHost(), pulled.getLabels().app]);
  tell('copied before the start', [await fetched(pulled, 8080, 'content.txt'), await fetched(pulled, 8080, 'file.txt'), await fetched(pulled, 8080, 'dir/host.txt')]);
  const ran = await pulled.exec(['sh', '-c', 'echo $A $PWD; ulimit -n; echo err >&2; exit 4']);
  tell('exec', [ran.exitCode, ran.stdout, ran.stderr]);
  const as = await pulled.exec(['sh', '-c', 'id -u; echo $X $PWD'], { user: '1000', workingDir: '/tmp', env: { X: 'y' } });
  tell('exec as a user', [as.exitCode, as.output]);
  await pulled.copyContentToContainer([{ content: 'later\n', target: '/srv/later.txt' }]);
  tell('copied after the start', await fetched(pulled, 8080, 'later.txt'));
  const archive = await pulled.copyArchiveFromContainer('/srv/later.txt');
  const pieces = [];
  for await (const p of archive) pieces.push(p);
  tell('archive', Buffer.concat(pieces).includes('later\n'));
  const logs = await pulled.logs();
  tell('logs', await new Promise((resolve) => { let all = ''; for (const e of ['end', 'close', 'error']) { logs.on(e, (x) => resolve([e, all, String(x)])); } logs.on('data', (d) => { all += d; if (all.includes('it is served')) resolve(true); }); }));
  logs.destroy();
  await pulled.restart();
  tell('restart', await fetched(pulled, 8080, 'later.txt'));
  const made = await pulled.commit({ repo: 'committed', tag: '1', deleteOnExit: false });
  tell('commit', made.replace(/[0-9a-f]{64}/, 'ID'));
  await pulled.stop();
  const again = await new GenericContainer('committed:1').withCommand(['cat', '/srv/later.txt']).withWaitStrategy(Wait.forLogMessage('later')).start();
  tell('run of what was committed', true);
  await again.stop();

  // an image that is built
  fs.writeFileSync(path.join(dir, 'Dockerfile'), 'FROM tool:1\nARG word\nCOPY host.txt /srv/host.txt\nRUN echo $word >/srv/word\nCMD ["busybox", "httpd", "-f", "-p", "8080", "-h", "/srv"]\nEXPOSE 8080\n');
  const image = await GenericContainer.fromDockerfile(dir).withBuildArgs({ word: 'argument' }).build('built:1', { deleteOnExit: false });
  const built = await image.withExposedPorts(8080).start();
  tell('build', [await fetched(built, 8080, 'host.txt'), await fetched(built, 8080, 'word')]);
  await built.stop();

  // a network
  const network = await new Network().start();
  const db = await new GenericContainer(IMAGE).withCommand(['sh', '-c', 'echo ready; exec busybox nc -ll -p 5432 -e echo rows']).withNetwork(network).withNetworkAliases('db', 'sql')
    .withWaitStrategy(Wait.forLogMessage('ready')).start();
  const web = await new GenericContainer(IMAGE).withCommand(['sh', '-c', 'mkdir /srv; until busybox nc sql 5432 </dev/null >/srv/rows; do :; done; exec busybox httpd -f -p 8080 -h /srv'])
    .withNetwork(network).withExposedPorts(8080).withWaitStrategy(Wait.forHttp('/rows', 8080).forResponsePredicate((b) => b === 'rows\n')).start();
  tell('network', [await fetched(web, 8080, 'rows'), db.getNetworkNames().includes(network.getName()), db.getNetworkNames().length]);
  await web.stop();
  await db.stop();
  await network.stop();
  fs.rmSync(dir, { recursive: true });
}

// The stream of a log on a connection that was idle before does not keep node running; suites of
// tests do.
setInterval(() => {}, 1 << 30);
main().then(() => process.exit(0), (e) => { console.error(e); process.exit(1); });
