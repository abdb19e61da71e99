"""Code in sandboxes of the daemon."""

import os
import subprocess
import sys
import tempfile
import threading
import unittest

from sandboxd import (
    InvalidArgumentException,
    LanguageNotFoundException,
    LibraryException,
    NotFoundException,
    Sandbox,
    TimeoutException,
    __version__,
)

from .support import HUNG, fresh, timed_out

SCRIPT = os.path.join(os.path.dirname(__file__), "..", "..", "..", "hack", "pyclient.py")


class Code(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.sandbox = fresh()
        cls.addClassCleanup(cls.sandbox.kill)

    def test_variables_stay(self):
        run = self.sandbox.run_code
        run("a = 40")
        second = run("a + 2")
        self.assertEqual((second.text, second.error), ("42", None))
        self.assertEqual(run("a + 2").execution_count, second.execution_count + 1)
        # They are the sandbox's, not this client's.
        self.assertEqual(Sandbox.connect(self.sandbox.sandbox_id).run_code("a").text, "40")
        self.assertEqual(self.sandbox.get_info().metadata, {})

    def test_callbacks(self):
        out, err, results, errors = [], [], [], []
        run = self.sandbox.run_code(
            "import sys\nprint('o')\nprint('e', file=sys.stderr)\n1/0",
            on_stdout=out.append,
            on_stderr=err.append,
            on_result=results.append,
            on_error=errors.append,
        )
        self.assertEqual("".join(m.line for m in out), "o\n")
        self.assertEqual("".join(m.line for m in err), "e\n")
        self.assertTrue(err[0].error and out[0].timestamp > 10**18)
        self.assertEqual((results, errors, run.exit_code), ([], [run.error], 1))
        self.assertEqual((run.error.name, run.error.value), ("ZeroDivisionError", "division by zero"))
        self.assertIn("line 4", run.error.traceback)

    def test_output_comes_while_the_code_runs(self):
        came = threading.Event()
        run = self.sandbox.run_code(
            "import os, time\nprint('now', flush=True)\nwhile not os.path.exists('/tmp/go'): time.sleep(0.01)\n'done'",
            on_stdout=lambda m: (came.set(), self.sandbox.files.write("/tmp/go", "")),
        )
        self.assertTrue(came.is_set())
        self.assertEqual(run.text, "done")

    def test_timeout_keeps_variables_and_output(self):
        self.sandbox.run_code("kept = 1")
        code = "print('begun', flush=True)\nwhile True: pass"
        e, _ = timed_out(TimeoutException, lambda s: self.sandbox.run_code(code, timeout=s))
        self.assertEqual(e.stdout, "begun\n")
        self.assertEqual(self.sandbox.run_code("kept").text, "1")

    def test_stateless(self):
        run = self.sandbox.run_code(
            "import sys; print(sys.argv[1:], input()); sys.exit(3)", stateless=True, args=["a"], stdin="ä\n"
        )
        self.assertEqual(("".join(run.logs.stdout), run.exit_code), ("['a'] ä\n", 3))
        code = "import subprocess\nprint(1, flush=True)\nsubprocess.run(['sleep', '7654'])"
        e, _ = timed_out(TimeoutException, lambda s: self.sandbox.run_code(code, stateless=True, timeout=s))
        self.assertEqual(e.stdout, "1\n")
        listed = self.sandbox._client.call(
            "GET", "v1", "sandboxes", self.sandbox.sandbox_id, "processes"
        ).get("processes", [])
        self.assertNotIn(["sleep", "7654"], [p.get("argv") for p in listed])

    def test_other_languages(self):
        self.assertEqual("".join(self.sandbox.run_code("echo $((6*7))", language="bash").logs.stdout), "42\n")
        with self.assertRaises(InvalidArgumentException):
            self.sandbox.run_code("x", language="cobol")
        with fresh(envs={"PATH": "/nonexistent"}) as bare:
            with self.assertRaises(LanguageNotFoundException):
                bare.run_code("puts 1", language="ruby")

    def test_artifacts(self):
        for options in ({}, {"stateless": True}):
            code = "import os; os.makedirs('/tmp/out', exist_ok=True); open('/tmp/out/a.csv', 'a').write('1')"
            found = self.sandbox.run_code(code, output_dir="/tmp/out", **options).artifacts
            self.assertEqual([(a.path, a.media_type) for a in found], [("/tmp/out/a.csv", "text/csv")])

    def test_contexts(self):
        context = self.sandbox.create_code_context(cwd="/tmp", envs={"A": "b"})
        run = lambda code: self.sandbox.run_code(code, context=context)
        self.assertEqual(run("import os; os.getcwd(), os.environ['A']").text, "('/tmp', 'b')")
        self.assertIn(context.id, [c.id for c in self.sandbox.list_code_contexts()])
        run("x = 1")
        self.sandbox.restart_code_context(context)
        self.assertEqual(run("x").error.name, "NameError")
        self.sandbox.remove_code_context(context)
        with self.assertRaises(NotFoundException):
            run("1")
        with self.assertRaises(InvalidArgumentException):
            self.sandbox.run_code("1", language="python", context=context)

    def test_a_deleted_default_context_is_replaced(self):
        sandbox = fresh()
        self.addCleanup(sandbox.kill)
        sandbox.run_code("x = 1")
        for context in sandbox.list_code_contexts():
            sandbox.remove_code_context(context)
        self.assertEqual(sandbox.run_code("2").text, "2")

    def test_interrupt(self):
        context = self.sandbox.create_code_context()
        self.sandbox.run_code("x = 5", context=context)
        runs = []

        def loop(message):
            self.sandbox.interrupt_code_context(context)

        run = self.sandbox.run_code(
            "print(1, flush=True)\nwhile True: pass", context=context, on_stdout=loop, timeout=HUNG
        )
        runs.append(run)
        self.assertEqual(run.error.name, "KeyboardInterrupt")
        self.assertEqual(self.sandbox.run_code("x", context=context).text, "5")

    def test_environment_of_a_run(self):
        code = "import os; os.environ.get('ONLY')"
        self.assertEqual(self.sandbox.run_code(code, envs={"ONLY": "here"}).text, "here")
        self.assertIsNone(self.sandbox.run_code(code).text)

    def test_forks_have_contexts_of_their_own(self):
        self.sandbox.run_code("x = 1")
        fork = self.sandbox.fork()[0]
        self.addCleanup(fork.kill)
        self.assertEqual(fork.run_code("'x' in globals()").text, "False")

    def test_missing_library(self):
        with self.assertRaises((LibraryException, InvalidArgumentException)):
            self.sandbox.run_code("1", libraries=["no-such-library-of-sandboxd"], stateless=True)

    def test_library_of_a_directory(self):
        with tempfile.TemporaryDirectory() as directory:
            subprocess.run([sys.executable, SCRIPT, "build", directory], check=True, stdout=subprocess.DEVNULL)
            (wheel,) = [n for n in os.listdir(directory) if n.endswith(".whl")]
            self.sandbox.upload_file(os.path.join(directory, wheel), f"/wheels/{wheel}")
        before = self.sandbox.run_code("import sandboxd")
        self.assertEqual(before.error.name, "ModuleNotFoundError")
        here = self.sandbox.run_code("import sandboxd; sandboxd.__version__", libraries=["sandboxd"], library_dir="/wheels")
        self.assertEqual(here.text, __version__)
        self.sandbox.install("sandboxd", library_dir="/wheels")
        after = self.sandbox.run_code("import sandboxd; print(sandboxd.__version__)", stateless=True)
        self.assertEqual(("".join(after.logs.stdout), after.exit_code), (f"{__version__}\n", 0))
        with self.assertRaises(LibraryException):
            self.sandbox.install("sandboxd2", library_dir="/wheels")
