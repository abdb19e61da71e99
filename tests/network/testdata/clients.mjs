// Clients of Node. Prints "ok NAME" for each that got its answer.
import crypto from 'node:crypto';
import http from 'node:http';
import https from 'node:https';
import http2 from 'node:http2';
import net from 'node:net';
import dns from 'node:dns/promises';

const cases = [];
const same = (got, want) => { if (got !== want) throw new Error(`${JSON.stringify(got)}, not ${JSON.stringify(want)}`); };
for (const scheme of ['http', 'https']) {
  for (const method of ['GET', 'POST', 'PUT', 'DELETE']) {
    const body = method === 'POST' || method === 'PUT' ? 'data' : undefined;
    cases.push([`fetch-${scheme}-${method}`, async () => {
      const r = await fetch(`${scheme}://site.test/echo/x`, { method, body });
      same((await r.text()).trim(), `${method} /echo/x${body ? ' data' : ''}`);
    }]);
  }
  const library = scheme === 'http' ? http : https;
  cases.push([`${scheme}-get`, () => new Promise((done, fail) => {
    library.get(`${scheme}://site.test/echo/get`, (r) => {
      let text = '';
      r.on('data', (d) => { text += d; });
      r.on('end', () => { try { same(text, 'GET /echo/get\n'); done(); } catch (e) { fail(e); } });
    }).on('error', fail);
  })]);
}
cases.push(['fetch-redirect', async () => same(await (await fetch('https://site.test/redirect')).text(), 'GET /echo/redirected\n')]);
cases.push(['fetch-redirect-refused', async () => {
  const r = await fetch('http://site.test/redirect?to=http://10.0.0.1/');
  same(r.status, 403);
}]);
cases.push(['fetch-many', async () => {
  const all = await Promise.all([...Array(50).keys()].map(async (i) => (await fetch(`https://site.test/echo/${i}`)).text()));
  all.forEach((text, i) => same(text, `GET /echo/${i}\n`));
}]);
cases.push(['fetch-download', async () => same((await (await fetch('https://site.test/bytes/8388608')).arrayBuffer()).byteLength, 8 << 20)]);
cases.push(['fetch-upload', async () => {
  const data = Buffer.alloc(4 << 20, 'sandbox');
  const sum = crypto.createHash('sha256').update(data).digest('hex');
  same(await (await fetch('https://site.test/sum', { method: 'PUT', body: data })).text(), sum);
}]);
cases.push(['fetch-events', async () => {
  const url = 'https://site.test/events?id=node';
  let text = '';
  for await (const part of (await fetch(url)).body) {
    text += Buffer.from(part).toString();
    same((await fetch(url, { method: 'POST' })).status, 204);
  }
  same(text, 'data: 0\ndata: 1\ndata: 2\n');
}]);
cases.push(['fetch-ipv6', async () => same(await (await fetch('https://six.site.test/echo/6')).text(), 'GET /echo/6\n')]);
cases.push(['fetch-refused-name', async () => {
  let code;
  try { await fetch('https://evil.test/'); } catch (e) { code = e.cause.code; }
  same(code, 'ENOTFOUND');
}]);
cases.push(['http2', () => new Promise((done, fail) => {
  const c = http2.connect('https://site.test');
  c.on('error', fail);
  const r = c.request({ ':path': '/echo/http2' });
  let text = '';
  r.setEncoding('utf8');
  r.on('data', (d) => { text += d; });
  r.on('end', () => { c.close(); try { same(text, 'GET /echo/http2\n'); done(); } catch (e) { fail(e); } });
  r.end();
})]);
cases.push(['dns', async () => {
  same((await dns.resolve4('site.test')).join(), '93.184.215.80');
  same((await dns.resolve6('site.test')).join(), '2606:2800:21f::80');
}]);
cases.push(['net', () => new Promise((done, fail) => {
  const c = net.connect({ host: 'raw.site.test', port: 9000, allowHalfOpen: true }, () => c.end('\0binary'));
  let text = '';
  c.on('data', (d) => { text += d; });
  c.on('error', fail);
  c.on('end', () => { try { same(text, '\0binary'); done(); } catch (e) { fail(e); } });
})]);

let failed = 0;
for (const [name, f] of cases) {
  try {
    await f();
    console.log('ok', name);
  } catch (e) {
    failed = 1;
    console.log('not ok', name, e, e.cause);
  }
}
process.exit(failed);
