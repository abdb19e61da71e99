'use strict';
// The resident kernel of javascript and typescript contexts, an argument of node -e. Node's own REPL evaluates the
// code, so that await works at the top. Requests come on descriptor 3; 4 and 5 are stdout and
// stderr. Output of programs is the exec's own; messages stand in it behind a NUL and the key.
(() => {
  const fs = require('fs');
  const util = require('util');
  const {Writable} = require('stream');
  const [REQUESTS, OUT, ERR] = [3, 4, 5];
  const MOST = 48 << 10;
  const MOST_MESSAGE = 16 << 20;
  const [key, language] = process.argv.slice(1);
  process.argv.length = 1;
  const pause = new Int32Array(new SharedArrayBuffer(4));

  function put(fd, data) {
    for (let at = 0; at < data.length;) {
      try {
        at += fs.writeSync(fd, data, at);
      } catch (e) {
        if (e.code !== 'EAGAIN') throw e;
        Atomics.wait(pause, 0, 0, 1); // the pipe is full, and a child has made it non-blocking
      }
    }
  }

  let number = 0;
  function say(kind, value) {
    let data = Buffer.from(JSON.stringify(value));
    while (data.length > MOST) {
      put(OUT, Buffer.concat([Buffer.from(`\0${key}:+ ${number} ${MOST}\n`), data.subarray(0, MOST)]));
      data = data.subarray(MOST);
    }
    put(OUT, Buffer.concat([Buffer.from(`\0${key}:${kind} ${number} ${data.length}\n`), data]));
  }

  // Streams that write at once: what was printed comes before the end of the run.
  for (const [name, fd] of [['stdout', 1], ['stderr', 2]]) {
    const write = (chunk, encoding, done) => {
      put(fd, typeof chunk === 'string' ? Buffer.from(chunk, typeof encoding === 'string' ? encoding : 'utf8') : chunk);
      done = typeof encoding === 'function' ? encoding : done;
      if (typeof done === 'function') process.nextTick(done);
      return true;
    };
    const stream = new Writable({
      decodeStrings: false, autoDestroy: false, emitClose: false,
      write(chunk, encoding, done) { write(chunk, encoding); done(); },
      destroy(error, done) { done(error); this._undestroy(); }, // as node's own streams of a process
    });
    // The methods of Writable keep state, which an interrupt in the middle would leave half changed.
    // These two keep none. The stream stays open for later runs.
    stream.write = write;
    stream.end = (...args) => {
      const done = args.find((arg) => typeof arg === 'function');
      if (typeof args[0] !== 'function' && args[0] !== undefined && args[0] !== null) write(args[0], done === args[1] ? 'utf8' : args[1]);
      process.nextTick(() => {
        stream.emit('finish');
        if (done) done();
      });
      return stream;
    };
    stream.fd = fd;
    stream._type = 'pipe';
    Object.defineProperty(process, name, {configurable: true, enumerable: true, get: () => stream});
  }
  const nothing = new (require('stream').PassThrough)();
  nothing.end();
  Object.defineProperty(process, 'stdin', {configurable: true, enumerable: true, get: () => nothing});

  // Signals that have come, until the last run's end, and those of runs that have ended; the
  // daemon's count of the latter.
  let [interrupts, seen, passed, told] = [0, 0, 0, 0];
  const interruption = () => Object.assign(new Error(), {code: 'ERR_SCRIPT_EXECUTION_INTERRUPTED'});
  const onInterrupt = () => {
    interrupts++;
    settle(pending, {error: interruption(), thrown: true, counted: true});
  };
  // Node installs a handler of SIGINT at the beginning of a piece of code, and removes it at the end
  // unless another user of the handler is left. The call of startSigintWatchdog makes such a user, so
  // the handler stays installed. Around a piece of code, node also removes all listeners of SIGINT and
  // adds them again, and would replace the handler each time. So node's internal listeners of these
  // changes do not learn of SIGINT. The function look calls the listeners of the user's code.
  let watchdog = {watchdogHasPendingSigint: () => false};
  try {
    watchdog = process.binding('contextify');
    watchdog.startSigintWatchdog();
    for (const event of ['newListener', 'removeListener']) {
      for (const listener of process.listeners(event)) {
        process.removeListener(event, listener);
        process.on(event, (name, f) => { if (name !== 'SIGINT') listener.call(process, name, f); });
      }
    }
  } catch { // a node without it: at the ends of a piece of code the signal ends the process
    process.on('SIGINT', onInterrupt);
  }
  // Node notes that a signal has come while no code ran. Returns whether one has since the last look.
  const came = () => {
    if (!watchdog.watchdogHasPendingSigint()) return false;
    watchdog.startSigintWatchdog();
    watchdog.stopSigintWatchdog(); // forgets it
    return true;
  };
  const look = () => {
    if (!came()) return;
    onInterrupt();
    setImmediate(() => process.emit('SIGINT', 'SIGINT', 2)); // to listeners of the user's, which may throw
  };
  const shown = (e) => {
    try {
      return String(e instanceof Error || (e && typeof e.stack === 'string') ? e.stack : `Uncaught ${util.inspect(e)}`);
    } catch { // an object of the user's that refuses
      return '';
    }
  };
  const clean = (text) => text.split('\n').filter((line) => !/^\s+at .*(\(?node:|\[eval\]|REPL)/.test(line)).join('\n').replace(/(<cell \d+>):(\d+)(?::(\d+))?/g, original);

  // Scripts have no import statements. Each keeps its lines.
  const dynamic = (code) => code.replace(/^import\s+(?:([\w$]+)\s*,?\s*)?(?:\*\s*as\s+([\w$]+)\s*|\{([^{}]*)\}\s*)?(?:from\s*)?(['"][^'"\n]+['"])/gm,
    (all, main, space, names, from) => {
      const parts = [main && `default: ${main}`, names?.replace(/([\w$]+)\s+as\s+([\w$]+)/g, '$1: $2')].filter(Boolean);
      return `${space ? `var ${space} = ` : ''}${parts.length ? `${space ? ', ' : 'var '}{${parts.join(', ')}} = ` : ''}await import(${from});`;
    });

  // Types are removed. Where that moves lines, a map has the user's own.
  const maps = new Map();
  const original = (place, name, line, column) => {
    const at = maps.get(name)?.findEntry(line - 1, (column || 1) - 1);
    if (!at || at.originalLine === undefined) return place;
    return `${name}:${at.originalLine + 1}` + (column ? `:${at.originalColumn + 1}` : '');
  };
  const mapped = (code, name) => {
    const at = code.lastIndexOf('\n//# sourceMappingURL=');
    const map = Buffer.from(code.slice(code.indexOf(',', at) + 1), 'base64').toString();
    maps.set(name, new (require('module').SourceMap)(JSON.parse(map)));
    return code.slice(0, at);
  };
  const byNode = (strip) => (code, name) => {
    const emit = process.emitWarning;
    process.emitWarning = () => {}; // that it is experimental
    try {
      return strip(code, {sourceUrl: name});
    } catch (e) {
      if (e.code !== 'ERR_UNSUPPORTED_TYPESCRIPT_SYNTAX') throw e;
      return mapped(strip(code, {mode: 'transform', sourceMap: true, sourceUrl: name}), name); // enumerations and the like
    } finally {
      process.emitWarning = emit;
    }
  };
  const byEsbuild = (code, name) => {
    const made = require('child_process').spawnSync('esbuild', ['--loader=ts', '--target=esnext', '--sourcemap=inline', `--sourcefile=${name}`, '--log-level=error',
      '--log-limit=1', '--color=false', '--tsconfig-raw={"compilerOptions":{"verbatimModuleSyntax":true,"preserveValueImports":true}}'], {input: code, encoding: 'utf8', maxBuffer: 64 << 20});
    if (made.status === 0) return mapped(made.stdout, name);
    const error = new SyntaxError((/\[ERROR\] (.*)/.exec(made.stderr) || [])[1] || `esbuild ended: ${made.error || made.signal}`);
    error.stack = `${error}\n${(made.stderr || '').split('\n').slice(1).join('\n').trimEnd()}`;
    throw error;
  };
  let prepare = (code) => code;
  if (language === 'typescript') {
    const strip = require('module').stripTypeScriptTypes;
    prepare = strip ? byNode(strip) : byEsbuild;
    if (!strip && require('child_process').spawnSync('esbuild', ['--version']).status !== 0) {
      put(ERR, Buffer.from(`typescript needs node 22.13, 23.2 or later, or esbuild beside it; this is node ${process.version}\n`));
      process.exit(1);
    }
  }
  process.on('uncaughtException', (e) => { put(2, Buffer.from(clean(shown(e)) + '\n')); });
  process.on('unhandledRejection', (e) => { put(2, Buffer.from(clean(shown(e)) + '\n')); });

  // The REPL runs code with this function. Node notices signals from the first instruction of the
  // code on, and forgets earlier ones. So __sandboxd_enter looks for an earlier signal before it runs
  // the code, which might have no end.
  const {Script} = require('vm');
  const world = globalThis;
  const now = Script.prototype.runInThisContext;
  const enter = new Script('__sandboxd_enter()', {filename: '[eval]'});
  Script.prototype.runInThisContext = function (options) {
    const look = () => { if (came()) throw interruption(); };
    try {
      Object.defineProperty(world, '__sandboxd_enter', {configurable: true, value: () => {
        delete world.__sandboxd_enter;
        look();
        return now.call(this, {displayErrors: false});
      }});
    } catch { // the user's code has made the global object one that takes no properties
      look();
      return now.call(this, options);
    }
    return now.call(enter, options);
  };
  const repl = require('repl');
  Script.prototype.runInThisContext = now;

  const input = new (require('stream').PassThrough)();
  const output = new Writable({write(chunk, encoding, done) { put(2, chunk); done(); }});
  const server = repl.start({prompt: '', input, output, terminal: false, useGlobal: true, breakEvalOnSigint: true, useColors: false});
  server.on('exit', () => {});
  server.removeAllListeners('SIGINT'); // or it would close
  server.on('SIGINT', onInterrupt); // one that came as the code ended

  function publish(value, main) {
    const text = typeof value === 'string' ? value : util.inspect(value);
    const bundle = {text};
    if (value && typeof value.toDataURL === 'function') {
      const m = /^data:image\/png;base64,(.*)$/.exec(value.toDataURL());
      if (m) bundle.png = m[1];
    }
    for (const [form, method] of [['html', 'toHTML'], ['svg', 'toSVG']]) {
      try {
        const v = value && typeof value === 'object' && typeof value[method] === 'function' && value[method]();
        if (typeof v === 'string') bundle[form] = v;
      } catch { /* it has no such form */ }
    }
    if (main) bundle.is_main_result = true;
    if (JSON.stringify(bundle).length > MOST_MESSAGE / 4) {
      for (const form of ['png', 'html', 'svg']) delete bundle[form];
      bundle.text = `${text.slice(0, 1000)}... [a result of ${text.length} characters]`;
    }
    say('r', bundle);
  }
  globalThis.display = (...values) => { for (const v of values) publish(v, false); };

  // The REPL passes what code throws at once to its domain, and other errors to the callback.
  let pending = null;
  const settle = (run, outcome) => {
    if (run === null || run !== pending) return false;
    pending = null;
    run(outcome);
    return true;
  };
  server._domain.removeAllListeners('error');
  server._domain.on('error', (error) => {
    if (!settle(pending, {error, thrown: true})) put(2, Buffer.from(clean(shown(error)) + '\n'));
  });
  const evaluate = (code, name) => { // outside of the promise's function, which stacks would show
    look();
    if (interrupts > passed) return {error: interruption(), thrown: true, counted: true}; // it came before the code began
    const outcome = new Promise((done) => { pending = done; });
    const run = pending;
    server.eval(code + '\n', server.context, name, (error, value) => settle(run, {error, thrown: error !== null && error !== undefined, value}));
    if (run !== pending) return outcome;
    const timer = setInterval(look, 20); // it awaits
    return outcome.finally(() => clearInterval(timer));
  };

  let count = 0;
  async function run(request) {
    const late = Date.now() + 500;
    const due = (request.interrupts || 0) - told;
    for (look(); interrupts - passed < due && Date.now() < late; look()) {
      await new Promise((done) => setTimeout(done, 5));
    }
    passed += Math.max(due, seen - passed);
    told += due;
    interrupts = Math.max(interrupts, passed); // one that does not come any more
    number = request.run;
    put(OUT, Buffer.from(`\0${key}:b ${number} 0\n`)); // from here on they are of this run
    count++;
    const cpu = process.cpuUsage();
    const old = {};
    for (const [name, value] of Object.entries(request.env || {})) {
      old[name] = process.env[name];
      process.env[name] = value;
    }
    const name = `<cell ${count}>`;
    let outcome;
    try {
      const code = prepare(request.code, name);
      outcome = await evaluate(code, name);
      if (outcome.thrown && /^Cannot use import statement/.test(outcome.error?.message)) {
        outcome = await evaluate(dynamic(code), name);
      }
    } catch (error) {
      look();
      outcome = interrupts > passed ? {error: interruption(), thrown: true, counted: true} : {error, thrown: true};
    }
    let {error, thrown, value, counted} = outcome;
    for (const [name, v] of Object.entries(old)) {
      if (v === undefined) delete process.env[name]; else process.env[name] = v;
    }
    const failed = thrown;
    let interrupted = false;
    try {
      if (error instanceof repl.Recoverable) error = error.err; // the REPL waits for more
      interrupted = failed && error && error.code === 'ERR_SCRIPT_EXECUTION_INTERRUPTED';
      if (interrupted && !counted) interrupts++; // node has ended the code
    } catch { /* an object of the user's that refuses */ }
    if (interrupted) {
      say('x', {name: 'KeyboardInterrupt', value: ''});
    } else if (failed) {
      let [kind, message] = ['Error', ''];
      try {
        kind = String((error && error.name) || 'Error');
        message = error && error.message !== undefined ? String(error.message) : util.inspect(error);
      } catch { /* as above */ }
      const trace = clean(shown(error));
      say('x', {name: kind.slice(0, 1000), value: message.slice(0, 100000), traceback: trace.slice(0, 200000)});
    } else if (value !== undefined) {
      server.last = value;
      try {
        publish(value, true);
      } catch { /* a value that refuses to be shown */ }
    }
    look();
    seen = interrupts;
    put(ERR, Buffer.from(`\0${key}:s ${number} 0\n`));
    const used = process.cpuUsage(cpu);
    say('d', {ok: !failed, count, cpu_ms: (used.user + used.system) / 1000, memory_peak: process.resourceUsage().maxRSS * 1024});
  }

  let rest = Buffer.alloc(0);
  let turn = Promise.resolve();
  // Not a file: a thread that reads one keeps the process from ending.
  const requests = new (require('net').Socket)({fd: REQUESTS, readable: true, writable: false});
  requests.on('data', (data) => {
    rest = Buffer.concat([rest, data]);
    for (let end; (end = rest.indexOf(10)) >= 0; rest = rest.subarray(end + 1)) {
      let request;
      try {
        request = JSON.parse(rest.subarray(0, end).toString());
      } catch { // cut off by the end of a daemon, or empty
        continue;
      }
      turn = turn.then(() => run(request)).catch(() => process.exit(1)); // never: or later runs would wait for ever
    }
  });
  requests.on('end', () => process.exit(0));
  say('h', {protocol: 1, language, version: process.version});
})();
