# The resident kernel of python contexts. It is the program of one exec: requests are lines of JSON
# on its stdin, answers are frames on its stdout (see doc.go). It runs inside the sandbox with the
# user's code in the same process, so the daemon trusts nothing that it says.
#
# The names of this file are in a module that the user's code does not see. Frames of the file
# "<sandboxd>" are left out of tracebacks.
import _signal  # without the enumerations of signal, which cost more than the calls
import ast
import builtins
import collections
import fcntl
import io
import json
import linecache
import os
import re
import select
import signal
import struct
import sys
import termios
import threading
import time
import traceback
import types

HEADER = struct.Struct(">IcI")
MOST = 48 << 10  # bytes of a frame's payload
MOST_MESSAGE = 16 << 20  # bytes of a result
HELD = 16 << 10  # bytes of output that wait for more
BETWEEN = 64 << 10  # bytes of output between runs that the next run gets
DELAY = 0.01  # seconds that output waits for more
MACHINERY = "<sandboxd>"
SIGNALS = sorted(signal.valid_signals() - {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})


def above(fd, low=200):
    """Moves a descriptor where programs do not expect one; children do not get it."""
    try:
        new = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, low)
    except OSError:  # a low RLIMIT_NOFILE
        new = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    return new


class Stream(io.BufferedIOBase):
    """Buffer below sys.stdout or sys.stderr, which sends frames."""

    def __init__(self, kernel, kind, fd):
        self._kernel, self._kind, self._fd = kernel, kind, fd

    name = property(lambda self: "<stdout>" if self._fd == 1 else "<stderr>")
    mode = "wb"

    def writable(self):
        return True

    def fileno(self):
        return self._fd

    def isatty(self):
        return False

    def write(self, data):
        with memoryview(data) as view:
            self._kernel.output(self._kind, view.tobytes())
            return view.nbytes

    def flush(self):
        self._kernel.flush()

    def close(self):
        self.flush()  # the context goes on


class Kernel:
    def __init__(self, extra):
        self.extra = extra  # source of the parts that are compiled when they are needed
        self.parts = {}
        self.seq = 0
        self.count = 0
        self.running = False  # a request is answered
        self.user = False  # the user's code runs, and an interrupt is for it
        # Signals that have come, until the last run's end, and those of runs that have ended; the
        # daemon's count of the latter.
        self.interrupts = self.seen = self.passed = self.told = 0
        self.child = False  # this is a fork of the kernel
        self.lock = threading.RLock()
        self.depth = 0  # of output within output, by handlers of signals
        self.held, self.held_kind = bytearray(), b"o"
        self.between, self.waiting, self.dropped = collections.deque(), 0, 0  # output between runs
        self.flushed = 0.0
        self.roused = False
        self.loop = None
        self.shell = None  # IPython's
        self.pid = os.getpid()

        self.requests, self.answers = above(0), above(1)
        self.crash = above(2)  # of the exec: the daemon shows its end when the process dies
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        self.pipes = {}
        for fd, kind in ((1, b"o"), (2, b"e")):
            r, w = os.pipe()
            os.dup2(w, fd)
            os.close(w)
            high = above(r)
            os.close(r)
            os.set_blocking(high, False)
            self.pipes[high] = kind
        r, w = os.pipe()
        self.wake_r, self.wake_w = above(r), above(w)
        os.close(r)
        os.close(w)
        os.set_blocking(self.wake_w, False)
        self.ready = select.poll()
        self.all = select.poll()
        for fd in self.pipes:
            self.ready.register(fd, select.POLLIN)
            self.all.register(fd, select.POLLIN)
        self.all.register(self.wake_r, select.POLLIN)
        sys.stdout = sys.__stdout__ = self.text(b"o", 1, "strict")
        sys.stderr = sys.__stderr__ = self.text(b"e", 2, "backslashreplace")

        self.main = types.ModuleType("__main__")
        self.ns = self.main.__dict__
        self.ns["__builtins__"] = builtins
        sys.modules["__main__"] = self.main
        sys.argv = [""]
        builtins.display = self.display
        sys.displayhook = self.displayhook
        self.hooks = {"matplotlib": self.use_inline, "IPython": lambda _: self.ipython(), "plotly.io": self.use_media_types, "sandboxd_inline": None}
        sys.meta_path.insert(0, self)
        os.register_at_fork(before=self.before_fork, after_in_parent=self.after_fork, after_in_child=self.in_child)
        signal.signal(signal.SIGINT, self.on_interrupt)
        self.handler = signal.getsignal(signal.SIGINT)
        try:
            import faulthandler
            faulthandler.enable(self.crash, all_threads=False)
        except (ImportError, OSError, RuntimeError):
            pass

    def text(self, kind, fd, errors):
        return io.TextIOWrapper(Stream(self, kind, fd), encoding="utf-8", errors=errors if errors != "strict" else "surrogateescape", newline="\n", write_through=True)

    # Frames.

    def frame(self, kind, payload):
        with self.lock:
            while len(payload) > MOST and kind not in b"oe":
                self.put(b"+", payload[:MOST])
                payload = payload[MOST:]
            for at in range(0, len(payload), MOST) or (0,):
                self.put(kind, payload[at:at + MOST])

    def put(self, kind, payload):
        data = memoryview(HEADER.pack(len(payload), kind, self.seq) + payload)
        # A handler of the user's that raises in the middle would cut the frame.
        masked = threading.current_thread() is threading.main_thread()
        if masked:
            old = _signal.pthread_sigmask(_signal.SIG_BLOCK, SIGNALS)
        try:
            while data:
                data = data[os.write(self.answers, data):]
        finally:
            if masked:
                _signal.pthread_sigmask(_signal.SIG_SETMASK, old)

    def message(self, kind, value):
        data = json.dumps(value, default=repr, ensure_ascii=False).encode("utf-8", "replace")
        with self.lock:
            self.settle()
            self.frame(kind, data)

    # Output. What processes and C code write to descriptors 1 and 2 comes through pipes; python's own
    # does not, but keeps its place between that.

    def output(self, kind, data):
        if not data:
            return
        if self.child:
            if self.held and self.held_kind != kind:
                self.pass_on()
            self.held_kind = kind
            self.held += data
            if data[-1] == 10 or len(self.held) >= HELD:
                self.pass_on()
            return
        with self.lock:
            self.depth += 1
            try:
                # The newline of a print comes by itself, and belongs to its text.
                if self.depth == 1 and data != b"\n" and self.ready.poll(0):
                    self.settle()
                self.hold(kind, data)
                if self.depth > 1:
                    return
                if not self.running:
                    return
                if len(self.held) >= HELD or data[-1] == 10 and time.monotonic() - self.flushed > DELAY:
                    self.send()
                elif not self.roused:
                    self.roused = True
                    self.rouse()
            finally:
                self.depth -= 1

    def rouse(self):
        try:
            os.write(self.wake_w, b"x")
        except BlockingIOError:
            pass

    def hold(self, kind, data):
        if not self.running:
            self.between.append((kind, data))
            self.waiting += len(data)
            while self.waiting > BETWEEN:
                _, first = self.between.popleft()
                self.waiting -= len(first)
                self.dropped += len(first)
            return
        if self.held and self.held_kind != kind:
            self.send()
        self.held_kind = kind
        self.held += data

    def send(self):
        if self.held and self.running:
            held, self.held = bytes(self.held), bytearray()
            self.flushed = time.monotonic()
            self.frame(self.held_kind, held)

    def settle(self):
        """Sends the output until now. It does not wait for processes that go on writing."""
        self.send()
        for fd, kind in self.pipes.items():
            left = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0]
            while left > 0:
                try:
                    data = os.read(fd, min(left, MOST))
                except BlockingIOError:  # another process has read from our pipe
                    break
                if not data:
                    break
                left -= len(data)
                self.hold(kind, data)
                self.send()

    def pass_on(self):
        """Writes the output of a fork to its descriptors, by lines."""
        data, self.held = bytes(self.held), bytearray()
        fd = 1 if self.held_kind == b"o" else 2
        while data:
            data = data[os.write(fd, data):]

    def flush(self):
        if self.child:
            self.pass_on()
        else:
            with self.lock:
                self.depth += 1
                try:
                    if self.depth == 1:
                        self.send()
                finally:
                    self.depth -= 1

    def pump(self):
        # A signal that the kernel gives to this thread does not wake the main one out of a wait.
        _signal.pthread_sigmask(_signal.SIG_BLOCK, SIGNALS)
        while True:
            for fd, _ in self.all.poll():
                if fd == self.wake_r:
                    os.read(fd, 512)
                    time.sleep(DELAY)
                    self.roused = False
            with self.lock:
                self.settle()

    def before_fork(self):
        if not self.child:
            self.lock.acquire()
            self.send()

    def after_fork(self):
        if not self.child:
            self.lock.release()

    def in_child(self):
        self.child = True
        self.lock = threading.RLock()
        self.held, self.between, self.waiting = bytearray(), collections.deque(), 0
        signal.signal(signal.SIGINT, signal.default_int_handler)

    # Requests.

    def preload(self, names):
        for name in names:
            try:
                __import__(name)
            except BaseException as e:
                os.write(self.crash, ("preload %s: %s: %s\n" % (name, type(e).__name__, e)).encode("utf-8", "replace"))
                os._exit(1)
        if names:
            self.part("display")
        with self.lock:  # what they have printed is of no run
            self.settle()
            self.between.clear()
            self.waiting = self.dropped = 0

    def serve(self):
        threading.Thread(target=self.pump, name="sandboxd output", daemon=True).start()
        self.preload(self.extra["preload"].split())
        self.frame(b"h", json.dumps({"protocol": 1, "language": "python", "version": "%d.%d.%d" % sys.version_info[:3]}).encode())
        buf = b""
        while True:
            line, sep, rest = buf.partition(b"\n")
            if not sep:
                more = os.read(self.requests, 1 << 16)
                if not more or self.child:
                    return
                buf += more
                continue
            buf = rest
            try:
                req = json.loads(line)
            except ValueError:  # cut off by the end of a daemon, or the empty line before each
                continue
            self.run(req)

    def on_interrupt(self, *_):
        self.interrupts += 1
        if self.user:
            raise KeyboardInterrupt

    def run(self, req):
        # An interrupt of the last run may still be on its way, and one of this run may be here.
        late, told = time.monotonic() + 0.5, req.get("interrupts", 0)
        while self.interrupts - self.passed < told - self.told and time.monotonic() < late:
            time.sleep(0.005)
        self.passed += max(told - self.told, self.seen - self.passed)
        self.told = told
        if self.interrupts < self.passed:  # one that does not come any more
            self.interrupts = self.passed
        signal.signal(signal.SIGINT, self.handler)
        cpu = os.times()
        with self.lock:
            self.seq = req["run"]
            self.count += 1
            self.running = True
            between, self.between, self.waiting = self.between, collections.deque(), 0
            if self.dropped:
                between.appendleft((b"e", b"[%d bytes of output between runs are dropped]\n" % self.dropped))
                self.dropped = 0
            for kind, data in between:
                self.hold(kind, data)
            self.send()
        env = dict(os.environ)
        failure = None
        try:
            try:
                self.user = True
                if self.interrupts > self.passed:
                    raise KeyboardInterrupt
                os.environ.update(req.get("env") or {})
                if req.get("installed"):
                    # The first installation makes the directory, which was not there at the start.
                    import importlib
                    import site

                    importlib.invalidate_caches()
                    site.addsitepackages(site.addusersitepackages(None))
                self.cell(req["code"])
                self.figures()
            finally:
                self.user = False
        except BaseException as e:
            self.user = False
            failure = e
        if self.child or os.getpid() != self.pid:
            self.leave(failure)
        if req.get("env"):
            for name in req["env"]:
                if name in env:
                    os.environ[name] = env[name]
                else:
                    os.environ.pop(name, None)
        try:
            for s in (sys.stdout, sys.stderr):
                s.flush()
            if "ctypes" in sys.modules:
                sys.modules["ctypes"].CDLL(None).fflush(None)
        except BaseException:
            pass  # the user's own object
        if failure is not None:
            self.message(b"x", self.failure(failure))
        self.seen = self.interrupts
        now = os.times()
        with self.lock:
            self.settle()
            import resource
            self.frame(b"d", json.dumps({
                "ok": failure is None,
                "count": self.count,
                "cpu_ms": 1000 * max(0, sum(now[:4]) - sum(cpu[:4])),
                "memory_peak": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            }).encode())
            self.running = False

    def leave(self, failure):
        """Ends a fork that came back from the user's code, as an interpreter of its own would end."""
        if not self.child:  # C code has made it
            self.in_child()
        code = 0 if failure is None else 1
        try:
            said = None
            if isinstance(failure, SystemExit):
                said = failure.code
                if said is None or isinstance(said, int):
                    code, said = (said or 0) & 0xff, None
            elif failure is not None:
                said = self.failure(failure)["traceback"]
            if said is not None:
                print(said, file=sys.stderr)
            sys.stderr.flush()
            sys.stdout.flush()
        except BaseException:
            pass  # the user's own object
        finally:
            try:
                self.flush()
            finally:
                os._exit(code)

    def cell(self, code):
        name = "<cell %d>" % self.count
        source = self.transform(code)
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | self.flags()
        tree = compile(source, name, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not quiet(source):
            last = ast.Expression(tree.body.pop().value)
        if tree.body:
            self.evaluate(compile(tree, name, "exec", flags, dont_inherit=True))
        if last is not None:
            # Names of __future__ that the cell imports hold for its last expression too.
            value = self.evaluate(compile(last, name, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | self.flags(), dont_inherit=True))
            self.displayhook(value)

    def flags(self):
        import __future__
        found = 0
        for name in __future__.all_feature_names:
            feature = getattr(__future__, name)
            if self.ns.get(name) is feature:
                found |= feature.compiler_flag
        return found

    def evaluate(self, code):
        if not code.co_flags & 0x80:  # inspect.CO_COROUTINE
            return eval(code, self.ns)
        import asyncio
        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(eval(code, self.ns))
        try:
            return self.loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                task.cancel()
                try:
                    self.loop.run_until_complete(task)
                except BaseException:
                    pass
            raise

    def failure(self, e):
        try:
            return self.describe(e)
        except BaseException as other:
            return {"name": name_of(e), "value": "", "traceback": "its description raised %s" % name_of(other)}

    def describe(self, e):
        try:
            value = str(e)
        except Exception:
            value = "<exception str() failed>"
        shown = traceback.TracebackException(type(e), e, e.__traceback__, compact=True)
        self.strip(shown, set())
        return {"name": name_of(e), "value": clip(value), "traceback": clip("".join(shown.format()).rstrip("\n"))}

    def strip(self, shown, seen):
        """Takes the machinery's frames out of a traceback and those that it follows."""
        if shown is None or id(shown) in seen:
            return
        seen.add(id(shown))
        kept = [f for f in shown.stack if f.filename != MACHINERY and not f.filename.startswith("<frozen importlib")]
        shown.stack[:] = kept
        for other in [shown.__cause__, shown.__context__] + list(getattr(shown, "exceptions", None) or ()):
            self.strip(other, seen)

    # Results.

    def part(self, name):
        """Returns a part of the kernel, which is compiled when it is first needed."""
        if name not in self.parts:
            part = types.ModuleType("sandboxd_" + name)
            part.kernel = self
            exec(compile(self.extra[name], MACHINERY, "exec"), part.__dict__)
            self.parts[name] = part
        return self.parts[name]

    def display(self, *values, **options):
        for v in values:
            self.send_value(v, False)

    def displayhook(self, value):
        if value is None:
            return
        for older, newer in (("___", "__"), ("__", "_")):
            if newer in self.ns:
                self.ns[older] = self.ns[newer]
        self.ns["_"] = value
        self.send_value(value, True)

    def send_value(self, value, main):
        t = type(value)
        if t in (int, float, bool, complex, bytes, list, tuple, dict, set, frozenset, str) and self.shell is None:
            text = repr(value)
            bundle = {"text": text[1:-1] if t is str else text}
        else:
            bundle = self.part("display").bundle(value)
        self.publish(bundle, main)

    def publish(self, bundle, main=False):
        if not bundle:
            return
        if main:
            bundle["is_main_result"] = True
        try:
            data = json.dumps(bundle, default=repr, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
        except ValueError:  # NaN is no JSON; nor is a value that contains itself
            bundle = {k: v for k, v in bundle.items() if isinstance(v, (str, bool))}
            data = json.dumps(bundle, ensure_ascii=False).encode("utf-8", "replace")
        if len(data) > MOST_MESSAGE:
            text = bundle.get("text") or ""
            bundle = {"text": "%s... [a result of %d bytes, more than %d]" % (text[:1000], len(data), MOST_MESSAGE)}
            if main:
                bundle["is_main_result"] = True
            data = json.dumps(bundle).encode()
        if self.child:
            print(bundle.get("text", ""))
            return
        with self.lock:
            self.settle()
            if self.running:
                self.frame(b"r", data)

    def figures(self):
        if "matplotlib.pyplot" in sys.modules:
            self.part("display").figures()
        if self.shell is not None:
            self.shell.events.trigger("post_execute")

    # IPython's syntax.

    def transform(self, code):
        try:
            compile(code, "<cell>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | self.flags(), dont_inherit=True)
            return code
        except (SyntaxError, ValueError):
            pass
        if not re.search(r"(?m)^\s*(%|!|\?|[\w., ]+=\s*[%!])|\?\s*$|^\s", code):
            return code
        return self.part("magic").transform(code)

    def ipython(self):
        if self.shell is None:
            self.part("magic").start()
        return self.shell

    # Imports that need something afterwards (importlib's finder).

    def find_spec(self, name, path=None, target=None):
        if name not in self.hooks:
            return None
        from importlib.machinery import ModuleSpec
        if name == "sandboxd_inline":
            return ModuleSpec(name, self)
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is None:
                continue
            loader = spec.loader
            execute = getattr(loader, "exec_module", None)
            if execute is not None:
                def exec_module(module):
                    execute(module)
                    then = self.hooks.pop(name, None)
                    if then is not None:
                        then(module)
                try:
                    loader.exec_module = exec_module
                except AttributeError:
                    pass
            return spec
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        self.part("display").inline(module)

    def use_inline(self, matplotlib):
        if "MPLBACKEND" not in os.environ:
            matplotlib.rcParams["backend"] = "module://sandboxd_inline"


    def use_media_types(self, io):
        if "PLOTLY_RENDERER" not in os.environ:
            io.renderers.default = "plotly_mimetype"  # notebooks' get scripts of megabytes before each


def quiet(source):
    """Reports whether a cell ends with a semicolon, behind which its value is not shown."""
    if ";" not in source:
        return False
    import tokenize
    last = ""
    try:
        for t in tokenize.generate_tokens(io.StringIO(source).readline):
            if t.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER, tokenize.INDENT, tokenize.DEDENT):
                last = t.string
    except (tokenize.TokenError, SyntaxError):
        return False
    return last == ";"


def clip(text, most=256 << 10):
    if len(text) <= most:
        return text
    return text[:most // 2] + "\n... [%d characters]\n" % (len(text) - most) + text[-most // 2:]


def name_of(e):
    try:
        return clip(str(type(e).__name__), 1000)
    except BaseException:  # the user's own metaclass
        return "Exception"


def begin():
    # The other parts: a line of JSON behind this file.
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(0, 1 << 16)
        if not more:
            raise SystemExit(1)
        line += more
    Kernel(json.loads(line)).serve()


begin()
