"""Sessions in the shape of LLM Sandbox."""

import os
import subprocess
import sys
import tempfile
import threading
import unittest

from sandboxd import Sandbox
from sandboxd.llm_sandbox import (
    ArtifactSandboxSession,
    ExhaustionStrategy,
    InteractiveSandboxSession,
    PoolConfig,
    PooledSandboxSession,
    RestrictedModule,
    SandboxSession,
    SandboxTimeoutError,
    SecurityIssueSeverity,
    SecurityPattern,
    SecurityPolicy,
    create_pool_manager,
)
from sandboxd.llm_sandbox.exceptions import (
    CommandEmptyError,
    ContainerError,
    LanguageNotSupportPlotError,
    LibraryInstallationNotSupportedError,
    PackageManagerError,
    PoolClosedError,
    PoolExhaustedError,
    SandboxError,
    SecurityViolationError,
    ValidationError,
)

from .support import HUNG, fresh, image, timed_out


class Policies(unittest.TestCase):
    policy = SecurityPolicy(
        SecurityIssueSeverity.MEDIUM,
        [SecurityPattern(r"\bos\.system\s*\(", "shell", SecurityIssueSeverity.HIGH)],
        [
            RestrictedModule("subprocess", "processes", SecurityIssueSeverity.HIGH),
            RestrictedModule("math", "", SecurityIssueSeverity.LOW),
        ],
    )

    def test_code(self):
        with SandboxSession(image=image(), security_policy=self.policy) as session:
            for code, safe, found in (
                ("print(1)", True, []),
                ("import os\nos.system('x')", False, ["shell"]),
                ("# os.system('x')\nx = 1  # import subprocess", True, []),
                ("import os, subprocess as s", False, ["processes"]),
                ("import subprocess32", True, []),
                ("__import__('subprocess')", False, ["processes"]),
                ("import math", True, ["math"]),
                ('x = """\n"""; import subprocess', False, ["processes"]),
            ):
                with self.subTest(code):
                    got, violations = session.is_safe(code)
                    self.assertEqual((got, [v.description for v in violations]), (safe, found))
            with self.assertRaises(SecurityViolationError) as caught:
                session.run("open('/tmp/ran', 'w')\nimport subprocess")
            self.assertEqual([v.description for v in caught.exception.violations], ["processes"])
            self.assertFalse(session.sandbox.files.exists("/tmp/ran"))
            self.assertEqual(session.run("import math; print(1)").stdout, "1\n")

    def test_code_in_a_context(self):
        with InteractiveSandboxSession(image=image(), security_policy=self.policy) as session:
            self.assertFalse(session.is_safe("!ls")[0])
            with self.assertRaises(SecurityViolationError):
                session.run("!ls")
            self.assertEqual(session.run("print(1)").stdout, "1\n")

    def test_a_pattern_that_only_python_has(self):
        policy = SecurityPolicy(patterns=[SecurityPattern("(?=a)b")])
        with SandboxSession(image=image(), security_policy=policy) as session:
            with self.assertRaisesRegex(ValidationError, "lookaround"):
                session.run("print(1)")

    def test_without_a_policy_all_is_safe(self):
        with SandboxSession(image=image()) as session:
            self.assertEqual(session.is_safe("import subprocess"), (True, []))


class Sessions(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.session = SandboxSession(lang="python", image=image())
        cls.session.open()
        cls.addClassCleanup(cls.session.close)

    def test_run(self):
        out = self.session.run("import sys\nprint('ä')\nprint('e', file=sys.stderr)\nsys.exit(3)")
        self.assertEqual((out.exit_code, out.stdout, out.stderr), (3, "ä\n", "e\n"))
        self.assertFalse(out.success())

    def test_streaming_keeps_exit_code_and_characters(self):
        pieces = []
        out = self.session.run(
            "import os, time\nos.write(1, b'\\xc3')\ntime.sleep(0.05)\nos.write(1, b'\\xa4\\n')\nraise SystemExit(5)",
            on_stdout=pieces.append,
        )
        self.assertEqual((out.exit_code, out.stdout, "".join(pieces)), (5, "ä\n", "ä\n"))

    def test_tracebacks_have_the_lines_of_the_code(self):
        out = self.session.run("x = 1\n\nraise ValueError('no')\n")
        self.assertIn("line 3", out.stderr)
        self.assertEqual(out.exit_code, 1)

    def test_a_timeout_leaves_no_process(self):
        code = "print(1, flush=True)\nimport os\nos.system('sleep 8765')"
        e, timeout = timed_out(SandboxTimeoutError, lambda s: self.session.run(code, timeout=s))
        self.assertEqual((e.timeout_duration, e.stdout), (timeout, "1\n"))
        self.assertEqual([p for p in self.session.sandbox.commands.list() if "8765" in str(p)], [])
        self.assertEqual(self.session.run("print(2)").stdout, "2\n")

    def test_runs_share_files_only(self):
        self.session.run("x = 1; open('kept', 'w').write('y')")
        self.assertEqual(self.session.run("print(open('kept').read(), 'x' in dir())").stdout, "y False\n")
        self.assertTrue(self.session.sandbox.files.exists("/sandbox/kept"))

    def test_commands(self):
        run = self.session.execute_command
        self.assertEqual(run("echo 'a  b' $HOME").stdout, "a  b $HOME\n")
        self.assertEqual(run("pwd").stdout, "/sandbox\n")
        self.assertEqual(run("sh -c 'exit 3'").exit_code, 3)
        self.assertEqual(run("no-such-program").exit_code, 127)
        out = self.session.execute_commands(["mkdir -p c", ("pwd", "/tmp"), "false", "touch never"])
        self.assertEqual(out.exit_code, 1)
        self.assertFalse(self.session.sandbox.files.exists("/sandbox/never"))
        for bad in ("", " "):
            with self.assertRaises(CommandEmptyError):
                run(bad)
        with self.assertRaises(ValidationError):
            run("echo 'a")

    def test_files(self):
        with tempfile.TemporaryDirectory() as d:
            for name, data in (("empty", b""), ("data", b"\0\xff"), ("two..dots", b"x")):
                with open(os.path.join(d, name), "wb") as f:
                    f.write(data)
                self.session.copy_to_runtime(os.path.join(d, name), f"/sandbox/in/{name}")
                back = os.path.join(d, "back", name)
                self.session.copy_from_runtime(f"/sandbox/in/{name}", back)
                with open(back, "rb") as f:
                    self.assertEqual(f.read(), data)
            self.session.copy_from_runtime("/sandbox/in", os.path.join(d, "all"))
            self.assertEqual(sorted(os.listdir(os.path.join(d, "all"))), ["data", "empty", "two..dots"])
            self.session.copy_to_runtime(os.path.join(d, "all"), "/sandbox/again")
            data, stat = self.session.get_archive("/sandbox/again/data")
            self.assertEqual((stat["name"], stat["size"]), ("data", 2))
            self.assertGreaterEqual(len(data), 1024)
            with self.assertRaises(FileNotFoundError):
                self.session.copy_from_runtime("/sandbox/nope", os.path.join(d, "x"))
            with self.assertRaises(FileNotFoundError):
                self.session.copy_to_runtime(os.path.join(d, "nope"), "/sandbox/x")
            with self.assertRaises(ValidationError):
                self.session.copy_to_runtime(os.path.join(d, "data"), "/sandbox/../etc/x")

    def test_a_failing_installation_is_an_error(self):
        with self.assertRaises(SandboxError):
            self.session.install(["no-such-library-of-sandboxd"])
        with SandboxSession(image=image(), skip_environment_setup=True) as session:
            with self.assertRaises(LibraryInstallationNotSupportedError):
                session.install(["x"])

    def test_an_existing_sandbox_stays(self):
        with fresh() as sandbox:
            with SandboxSession(container_id=sandbox.sandbox_id, workdir="/tmp") as session:
                self.assertEqual(session.run("print(1)").stdout, "1\n")
            self.assertTrue(sandbox.is_running())
        with self.assertRaises(ContainerError):
            SandboxSession(container_id="nope").open()

    def test_other_languages(self):
        with SandboxSession(lang="bash", image=image()) as session:
            self.assertEqual(session.run("echo hi; exit 2").exit_code, 2)

    def test_a_killed_client_leaves_no_sandbox(self):
        program = (
            "import os, signal\n"
            "from sandboxd.llm_sandbox import SandboxSession\n"
            "session = SandboxSession()\n"
            "session.open()\n"
            "print(session.container_id, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, encoding="utf-8")
        name = done.stdout.strip()
        self.assertTrue(name)
        client = self.session.sandbox._client
        watch = threading.Event()
        for _ in range(HUNG * 20):
            if name not in [s["id"] for s in client.call("GET", "v1", "sandboxes")["sandboxes"]]:
                return
            watch.wait(0.05)
        self.fail("the sandbox is still there")

    def test_a_session_that_idles_stays(self):
        info = self.session.sandbox.get_info()
        self.assertGreater(info.raw["idle_timeout"], 86400)
        with SandboxSession(image=image(), session_timeout=90) as session:
            self.assertEqual(session.sandbox.get_info().raw["idle_timeout"], 90)

    def test_closing_deletes(self):
        with SandboxSession(image=image()) as session:
            name = session.container_id
        self.assertFalse(Sandbox.kill(name))


class Interactive(unittest.TestCase):
    def test_variables(self):
        with InteractiveSandboxSession(image=image()) as session:
            self.assertEqual(session.run("x = 41\nprint('set')").stdout, "set\n")
            self.assertEqual(session.run("x + 1").stdout, "Out[2]: 42\n")
            out = session.run("1/0")
            self.assertEqual(out.exit_code, 1)
            self.assertIn("ZeroDivisionError", out.stderr)
            with self.assertRaises(SandboxTimeoutError):
                session.run("while True: pass", timeout=1)
            self.assertIn("41", session.run("x").stdout)
            session.reset()
            self.assertIn("NameError", session.run("x").stderr)


class Artifacts(unittest.TestCase):
    SHOW = (
        "class Picture:\n"
        "    def _repr_png_(self):\n"
        "        import base64\n"
        "        return base64.b64decode('iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==')\n"
        "Picture()\n"
    )

    def test_plots(self):
        with ArtifactSandboxSession(image=image()) as session:
            out = session.run(self.SHOW)
            self.assertEqual((out.exit_code, out.stderr, len(out.plots)), (0, "", 1))
            plot = out.plots[0]
            self.assertEqual((plot.format.value, plot.width, plot.height), ("png", 1, 1))
            self.assertEqual(len(session.run(self.SHOW).plots), 2)
            self.assertEqual(len(session.run(self.SHOW, clear_plots=True).plots), 1)
            self.assertEqual(session.run("print('Picture' in globals())").stdout, "False\n")
            self.assertEqual(session.sandbox.list_code_contexts(), [])

    def test_languages_without_plots(self):
        with self.assertRaises(LanguageNotSupportPlotError):
            ArtifactSandboxSession(lang="go").open()
        with ArtifactSandboxSession(lang="bash", image=image(), enable_plotting=False) as session:
            self.assertEqual(session.run("echo hi").stdout, "hi\n")


class Pools(unittest.TestCase):
    def pool(self, **config):
        pool = create_pool_manager(config=PoolConfig(**config), lang="python", image=image())
        self.addCleanup(pool.close)
        return pool

    def test_a_sandbox_is_used_once(self):
        pool = self.pool(max_pool_size=2, min_pool_size=1)
        seen = set()
        for _ in range(3):
            with SandboxSession(pool=pool) as session:
                self.assertIsInstance(session, PooledSandboxSession)
                self.assertEqual(session.run("import os; print(os.path.exists('/tmp/dirt'))").stdout, "False\n")
                session.run("open('/tmp/dirt', 'w')")
                self.assertNotIn(session.container_id, seen)
                seen.add(session.container_id)
        for name in seen:
            self.assertFalse(Sandbox.kill(name))

    def test_warm_sandboxes(self):
        pool = self.pool(min_pool_size=1)
        warm = pool._idle[0]
        self.assertEqual(pool.acquire().sandbox_id, warm.sandbox_id)
        pool = self.pool(min_pool_size=1)
        pool._idle[0].kill()
        self.assertTrue(pool.acquire().is_running())

    def test_exhaustion(self):
        pool = self.pool(max_pool_size=1, exhaustion_strategy=ExhaustionStrategy.FAIL_FAST)
        with PooledSandboxSession(pool):
            with self.assertRaises(PoolExhaustedError):
                PooledSandboxSession(pool).open()
        pool = self.pool(max_pool_size=1, exhaustion_strategy="temporary")
        with PooledSandboxSession(pool), PooledSandboxSession(pool) as second:
            self.assertEqual(second.run("print(1)").stdout, "1\n")
        pool = self.pool(max_pool_size=1, acquisition_timeout=0.05)
        with PooledSandboxSession(pool):
            with self.assertRaises(PoolExhaustedError):
                PooledSandboxSession(pool).open()

    def test_waiting(self):
        pool = self.pool(max_pool_size=1, acquisition_timeout=HUNG)
        first = pool.acquire()
        got = []
        thread = threading.Thread(target=lambda: got.append(pool.acquire()))
        thread.start()
        pool.release(first)
        thread.join(HUNG)
        self.assertEqual(len(got), 1)
        self.assertNotEqual(got[0].sandbox_id, first.sandbox_id)

    def test_close(self):
        pool = self.pool(max_pool_size=2, min_pool_size=2)
        self.assertEqual(pool.get_stats()["state_counts"]["idle"], 2)
        busy = pool.acquire()
        pool.close()
        self.assertFalse(busy.is_running())
        self.assertTrue(pool.get_stats()["closed"])
        with self.assertRaises(PoolClosedError):
            pool.acquire()

    def test_sizes(self):
        with self.assertRaises(ValidationError):
            PoolConfig(max_pool_size=0)

    def test_failing_libraries_make_no_pool(self):
        with self.assertRaises((PackageManagerError, SandboxError)):
            create_pool_manager(image=image(), libraries=["no-such-library-of-sandboxd"], network="none")
