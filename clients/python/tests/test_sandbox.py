"""Sandboxes of the daemon, by the client for threads."""

import io
import socket
import threading
import time
import unittest
from unittest import mock

from sandboxd import (
    CommandExitException,
    ConflictException,
    FilesystemEventType,
    FileNotFoundException,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)

from .support import HUNG, fresh, image, timed_out


class Life(unittest.TestCase):
    def test_a_sandbox_ends_with_its_block(self):
        with fresh(metadata={"team": "docs"}, envs={"A": "b"}, timeout=900) as sandbox:
            info = sandbox.get_info()
            self.assertEqual((info.state, info.metadata), (SandboxState.RUNNING, {"team": "docs"}))
            self.assertEqual(info.raw["idle_timeout"], 900)
            self.assertTrue(sandbox.is_running())
            self.assertEqual(sandbox.commands.run("echo $A").stdout, "b\n")
        self.assertFalse(sandbox.is_running())
        self.assertFalse(sandbox.kill())
        with self.assertRaises(SandboxNotFoundException):
            sandbox.get_info()

    def test_by_id(self):
        sandbox = fresh()
        self.addCleanup(sandbox.kill)
        name = sandbox.sandbox_id
        self.assertEqual(Sandbox.connect(name).commands.run("echo hi").stdout, "hi\n")
        self.assertEqual(Sandbox.get_info(name).sandbox_id, name)
        self.assertTrue(Sandbox.kill(name))
        self.assertFalse(Sandbox.kill(name))
        with self.assertRaises(SandboxNotFoundException):
            Sandbox.connect(name)
        for call in (Sandbox.get_info, Sandbox.pause, Sandbox.resume):
            with self.assertRaises(NotFoundException):
                call(name)

    def test_timeouts(self):
        with fresh(timeout=100) as sandbox:
            before = sandbox.get_info().end_at
            sandbox.set_timeout(5000)
            info = sandbox.get_info()
            self.assertGreater((info.end_at - before).total_seconds(), 4000)
            self.assertEqual(info.raw["idle_timeout"], 5000)
            Sandbox.connect(sandbox.sandbox_id, timeout=10)
            self.assertEqual(sandbox.get_info().end_at, info.end_at)
            with self.assertRaises(InvalidArgumentException):
                Sandbox.set_timeout(sandbox.sandbox_id, 0)

    def test_list(self):
        with fresh(metadata={"list": "1"}) as one, fresh(metadata={"list": "1"}) as two:
            query = SandboxQuery(metadata={"list": "1"}, state=[SandboxState.RUNNING])
            pages = Sandbox.list(query, limit=1)
            self.assertEqual([i.sandbox_id for i in pages.next_items()], [two.sandbox_id])
            self.assertTrue(pages.has_next)
            self.assertEqual([i.sandbox_id for i in pages.next_items()], [one.sandbox_id])
            self.assertFalse(pages.has_next)
            self.assertEqual(
                [i.sandbox_id for i in Sandbox.list(query)], [two.sandbox_id, one.sandbox_id]
            )
            self.assertEqual(list(Sandbox.list(SandboxQuery(metadata={"list": "2"}))), [])
            query.state = [SandboxState.STOPPED]
            self.assertEqual(list(Sandbox.list(query)), [])

    def test_a_tied_sandbox_ends_with_its_connection(self):
        sandbox = fresh()
        sandbox._tie.close()
        # The daemon deletes it when it sees the end; a wait by the API ends with the sandbox.
        try:
            sandbox._client.call("GET", "v1", "sandboxes", sandbox.sandbox_id, "wait")
        except SandboxException:
            pass
        with self.assertRaises(NotFoundException):
            while True:
                sandbox.commands.run("true")

    def test_refusals(self):
        for options in (
            {"image": "host", "snapshot": "x"},
            {"template": "x", "image": "host"},
            {"network": "none", "allow_internet_access": True},
            {"limits": {"memory": "much"}},
            {"envs": {"A=B": "c"}},
            {"network": "sideways"},
            {"settings": {"nonsense": 1}},
            {"settings": {"image": "host"}, "image": "host"},
        ):
            with self.subTest(options), self.assertRaises(InvalidArgumentException):
                Sandbox.create(**options)

    def test_fork_and_snapshot(self):
        with fresh(metadata={"a": "b"}) as sandbox:
            sandbox.files.write("/tmp/x", "1")
            forks = sandbox.fork(2, envs={"F": "g"}, metadata={"c": "d"}, timeout=600)
            try:
                for fork in forks:
                    self.assertEqual(fork.files.read("/tmp/x"), "1")
                    self.assertEqual(fork.commands.run("echo $F").stdout, "g\n")
                    self.assertEqual(fork.get_info().metadata, {"a": "b", "c": "d"})
                forks[0].files.write("/tmp/x", "2")
                self.assertEqual(forks[1].files.read("/tmp/x"), "1")
            finally:
                for fork in forks:
                    fork.kill()
            snapshot = sandbox.create_snapshot("py-client")
            try:
                self.assertIn(snapshot.snapshot_id, [s.snapshot_id for s in Sandbox.list_snapshots()])
                self.assertEqual(len(Sandbox.list_snapshots(sandbox.sandbox_id)), 1)
                with Sandbox.create("py-client", tie=True) as copy:
                    self.assertEqual(copy.files.read("/tmp/x"), "1")
            finally:
                self.assertTrue(Sandbox.delete_snapshot(snapshot.snapshot_id))
            self.assertFalse(Sandbox.delete_snapshot(snapshot.snapshot_id))

    def test_stop_and_start(self):
        with Sandbox.create(image=image(), auto_remove=False, tie=True) as sandbox:
            sandbox.files.write("/tmp/x", "1")
            sandbox.stop(grace=0)
            self.assertEqual(sandbox.get_info().state, SandboxState.STOPPED)
            with self.assertRaises(ConflictException):
                Sandbox.connect(sandbox.sandbox_id)
            sandbox.start()
            self.assertEqual(sandbox.files.read("/tmp/x"), "1")
            snapshot = sandbox.snapshot()
            sandbox.files.write("/tmp/x", "2")
            sandbox.rollback(snapshot.snapshot_id)
            self.assertEqual(sandbox.files.read("/tmp/x"), "1")
            Sandbox.delete_snapshot(snapshot.snapshot_id)

    def test_pause(self):
        with fresh() as sandbox:
            try:
                paused = sandbox.pause()
            except SandboxException as e:
                self.assertIn("cgroup", str(e))  # this host cannot freeze, and says so
                return
            self.assertTrue(paused)
            self.assertFalse(sandbox.pause())
            self.assertFalse(sandbox.is_running())
            with self.assertRaises(ConflictException):
                sandbox.commands.run("true")
            again = Sandbox.connect(sandbox.sandbox_id)
            self.assertEqual(again.commands.run("echo hi").stdout, "hi\n")
            sandbox.pause()
            sandbox.resume()
            self.assertTrue(sandbox.is_running())


class Commands(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.sandbox = fresh()
        cls.addClassCleanup(cls.sandbox.kill)
        cls.run_ = cls.sandbox.commands.run

    def test_output(self):
        pieces = []
        result = self.sandbox.commands.run(
            "echo out; echo err >&2",
            on_stdout=lambda t: pieces.append(("out", t)),
            on_stderr=lambda t: pieces.append(("err", t)),
        )
        self.assertEqual((result.stdout, result.stderr, result.exit_code), ("out\n", "err\n", 0))
        self.assertEqual(sorted(pieces), [("err", "err\n"), ("out", "out\n")])

    def test_exit_code_with_callbacks(self):
        with self.assertRaises(CommandExitException) as caught:
            self.sandbox.commands.run("echo a; echo b >&2; exit 3", on_stdout=lambda t: None)
        e = caught.exception
        self.assertEqual((e.exit_code, e.stdout, e.stderr), (3, "a\n", "b\n"))

    def test_characters_in_pieces(self):
        """A character that is written in two pieces arrives whole."""
        pieces = []
        result = self.sandbox.commands.run(
            r"printf '\303'; sleep 0.05; printf '\244b\377\n'; printf '\342\202'", on_stdout=pieces.append
        )
        self.assertEqual(result.stdout, "äb\ufffd\n\ufffd")
        self.assertEqual("".join(pieces), result.stdout)

    def test_request_timeout_does_not_bound_the_command(self):
        clock, passed = time.monotonic, []

        def late(text):
            if not passed:  # the first output: the clock jumps, as no request may take long on its own account
                passed.append(2 * HUNG)
                self.sandbox.files.write("/tmp/late", "")

        with mock.patch("time.monotonic", lambda: clock() + sum(passed)):
            result = self.sandbox.commands.run(
                "echo a; until [ -e /tmp/late ]; do sleep 0.01; done; echo b", on_stdout=late, request_timeout=HUNG
            )
        self.assertEqual((result.stdout, passed), ("a\nb\n", [2 * HUNG]))

    def test_large_output(self):
        result = self.sandbox.commands.run("head -c 5000000 /dev/zero | tr '\\0' x")
        self.assertEqual(len(result.stdout), 5_000_000)

    def test_arguments(self):
        run = self.sandbox.commands.run
        self.assertEqual(run(["echo", "$HOME; a  b"]).stdout, "$HOME; a  b\n")
        self.assertEqual(run("pwd; echo $X", cwd="/tmp", envs={"X": "y"}).stdout, "/tmp\ny\n")
        self.assertEqual(run("cat", stdin="grüße").stdout, "grüße")
        self.assertEqual(run("wc -c", stdin=b"\0\xff").stdout.strip(), "2")
        for bad in ("", [], "  "):
            with self.assertRaises(InvalidArgumentException):
                run(bad)
        with self.assertRaises(InvalidArgumentException):
            run("cat", stdin=True)
        with self.assertRaises(SandboxException) as caught:
            run(["nonexistent-program"])
        self.assertEqual(caught.exception.code, "program_not_found")

    def test_a_timeout_kills_the_tree_and_keeps_the_output(self):
        run = self.sandbox.commands.run
        e, _ = timed_out(TimeoutException, lambda s: run("echo begun; sleep 4321 & sleep 4321", timeout=s))
        self.assertEqual(e.stdout, "begun\n")
        listed = self.sandbox._client.call(
            "GET", "v1", "sandboxes", self.sandbox.sandbox_id, "processes"
        )["processes"]
        self.assertNotIn(["sleep", "4321"], [p.get("argv") for p in listed])

    def test_an_exception_of_a_callback_kills_the_command(self):
        class Stop(Exception):
            pass

        def stop(text):
            raise Stop

        with self.assertRaises(Stop):
            self.sandbox.commands.run("echo a; exec sleep 5432", on_stdout=stop, timeout=0)
        self.wait_gone("sleep 5432")

    def wait_gone(self, marker):
        watch = threading.Event()
        for _ in range(HUNG * 20):
            listed = self.sandbox._client.call(
                "GET", "v1", "sandboxes", self.sandbox.sandbox_id, "processes"
            ).get("processes", [])
            if not any(marker in " ".join(p.get("argv") or []) for p in listed):
                return
            watch.wait(0.05)
        self.fail(f"{marker} still runs")

    def test_background(self):
        handle = self.sandbox.commands.run("cat; exit 4", background=True, stdin=True)
        self.assertIn(handle.pid, [p.pid for p in self.sandbox.commands.list()])
        handle.send_stdin("a\n")
        self.sandbox.commands.send_stdin(handle.pid, b"\xc3\xa4\n")
        other = Sandbox.connect(self.sandbox.sandbox_id).commands.connect(handle.pid)
        handle.close_stdin()
        for h in (handle, other):
            with self.assertRaises(CommandExitException) as caught:
                h.wait()
            self.assertEqual((caught.exception.exit_code, caught.exception.stdout), (4, "a\nä\n"))
        self.assertEqual(handle.exit_code, 4)
        self.assertFalse(handle.kill())

    def test_background_callbacks_need_no_wait(self):
        came = threading.Event()
        handle = self.sandbox.commands.run(
            "echo one; exec sleep 100", background=True, on_stdout=lambda t: came.set()
        )
        self.assertTrue(came.wait(HUNG))
        self.assertTrue(handle.kill())
        with self.assertRaises(CommandExitException) as caught:
            handle.wait()
        self.assertEqual((caught.exception.signal, caught.exception.stdout), ("SIGKILL", "one\n"))

    def test_iteration_goes_on_after_a_disconnect(self):
        handle = self.sandbox.commands.run("echo one; cat; echo two >&2", background=True, stdin=True)
        for out, err, pty in handle:
            self.assertEqual((out, err, pty), ("one\n", None, None))
            handle.disconnect()
            break
        handle.close_stdin()
        self.assertEqual([e for e in handle], [(None, "two\n", None)])
        self.assertEqual((handle.stdout, handle.stderr, handle.exit_code), ("one\n", "two\n", 0))

    def test_kill_by_pid(self):
        handle = self.sandbox.commands.run("sleep 100", background=True)
        self.assertTrue(self.sandbox.commands.kill(handle.pid))
        with self.assertRaises(CommandExitException):
            handle.wait()
        self.assertFalse(self.sandbox.commands.kill(handle.pid))
        with self.assertRaises(NotFoundException):
            self.sandbox.commands.send_stdin(999999, "x")

    def test_kill_reaches_other_process_groups(self):
        handle = self.sandbox.commands.run("setsid sleep 9876 & echo up; wait", background=True)
        for out, _, _ in handle:
            break
        handle.kill()
        self.wait_gone("sleep 9876")

    def test_terminal(self):
        seen = []
        handle = self.sandbox.pty.create(PtySize(rows=30, cols=100), cmd="stty size; read x; stty size")
        self.sandbox.pty.resize(handle.pid, PtySize(rows=40, cols=120))
        self.sandbox.pty.send_stdin(handle.pid, b"\n")
        handle.wait(on_pty=seen.append)
        text = b"".join(seen)
        self.assertIn(b"40 120\r\n", text)
        shell = self.sandbox.pty.create()
        shell.send_stdin("exit 7\n")
        with self.assertRaises(CommandExitException) as caught:
            shell.wait()
        self.assertEqual(caught.exception.exit_code, 7)

    def test_a_killed_sandbox_ends_its_commands(self):
        sandbox = fresh()
        handle = sandbox.commands.run("exec sleep 100", background=True)
        sandbox.kill()
        with self.assertRaises(SandboxException):
            handle.wait()
        with self.assertRaises(NotFoundException):
            sandbox.commands.run("true")


class Files(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.sandbox = fresh(cwd="/work")
        cls.addClassCleanup(cls.sandbox.kill)
        cls.files = cls.sandbox.files

    def test_content(self):
        for data in ("", "ä\n", b"", b"\0\xff", io.BytesIO(b"x" * 200_000), io.StringIO("ß")):
            with self.subTest(data):
                info = self.files.write("/tmp/d/e/f", data)
                self.assertEqual((info.name, info.path), ("f", "/tmp/d/e/f"))
                if isinstance(data, (io.BytesIO, io.StringIO)):
                    data = data.getvalue()
                want = data if isinstance(data, bytes) else data.encode()
                self.assertEqual(self.files.read("/tmp/d/e/f", "bytes"), want)
                self.assertEqual(b"".join(self.files.read("/tmp/d/e/f", "stream")), want)
                self.assertEqual(self.files.read("/tmp/d/e/f"), want.decode("utf-8", "replace"))

    def test_relative_paths_and_modes(self):
        self.files.write("run.sh", "#!/bin/sh\necho $0\n", mode=0o755)
        self.assertEqual(self.sandbox.commands.run("./run.sh").stdout, "./run.sh\n")
        info = self.files.get_info("/work/run.sh")
        self.assertEqual((info.mode, info.permissions, info.size), (0o755, "-rwxr-xr-x", 18))
        self.files.write("run.sh", "exit\n", append=True)
        self.assertEqual(self.files.get_info("run.sh").size, 23)

    def test_trees(self):
        self.assertTrue(self.files.make_dir("t/a"))
        self.assertFalse(self.files.make_dir("t/a"))
        self.files.write_files([{"path": "t/a/1", "data": "x"}, {"path": "t/2 ö", "data": b"yy"}])
        self.sandbox.commands.run("ln -s nowhere t/l", cwd="/work")
        listed = [(e.path, e.type.value, e.size) for e in self.files.list("t", depth=2) if e.type.value != "dir"]
        self.assertEqual(
            listed, [("/work/t/2 ö", "file", 2), ("/work/t/a/1", "file", 1), ("/work/t/l", "symlink", 7)]
        )
        self.assertEqual([e.name for e in self.files.list("t")], ["2 ö", "a", "l"])
        self.assertTrue(self.files.exists("t/l"))
        self.files.write("t/3", "z")
        self.assertEqual(self.files.rename("t/2 ö", "t/3").size, 2)
        self.files.remove("t")
        self.assertFalse(self.files.exists("t"))

    def test_names_that_are_no_text(self):
        self.sandbox.commands.run(r"mkdir -p /work/odd && cd /work/odd && touch $(printf 'a\377') && ln -s $(printf 'a\377') l", cwd="/")
        entry, link = self.files.list("odd")
        self.assertEqual((entry.name, link.symlink_target), ("a\udcff", "a\udcff"))
        self.files.write(entry.path, "1")
        moved = self.files.rename(entry.path, entry.path + "\udcfe")
        self.assertEqual(self.files.read(moved.path), "1")
        self.files.make_dir("odd/\udcff/d")
        self.files.remove("odd/\udcff")
        self.files.remove(moved.path)
        self.assertEqual([e.name for e in self.files.list("odd")], ["l"])

    def test_errors(self):
        for call in (
            lambda: self.files.read("/nope"),
            lambda: self.files.list("/nope"),
            lambda: self.files.get_info("/nope"),
            lambda: self.files.remove("/nope"),
            lambda: self.files.rename("/nope", "/nope2"),
            lambda: self.files.watch_dir("/nope"),
        ):
            with self.assertRaises(FileNotFoundException):
                call()
        with self.assertRaises(SandboxException):
            self.files.read("/tmp")
        with self.assertRaises(InvalidArgumentException):
            self.files.read("../etc/passwd")
        with self.assertRaises(InvalidArgumentException):
            self.files.write("x", 5)
        with self.assertRaises(InvalidArgumentException):
            self.files.read("x", "yaml")
        gone = fresh()
        gone.kill()
        with self.assertRaises(SandboxNotFoundException):
            gone.files.read("/etc/passwd")

    def test_watch(self):
        self.files.make_dir("/tmp/watched")
        came = threading.Event()
        events = []

        def on_event(event):
            events.append(event)
            if event.type is FilesystemEventType.REMOVE:
                came.set()

        handle = self.files.watch_dir("/tmp/watched", on_event=on_event)
        self.files.write("/tmp/watched/x", "1")
        self.files.remove("/tmp/watched/x")
        self.assertTrue(came.wait(HUNG))
        handle.stop()
        self.assertEqual([(e.name, e.type.value) for e in events], [("x", "write"), ("x", "remove")])
        self.assertEqual(handle.get_new_events(), [])

    def test_stop_wakes_a_watch_that_waits(self):
        handle = self.files.watch_dir("/tmp")
        self.sandbox.commands.run("true")  # by now the watch's thread waits for the daemon
        stopper = threading.Thread(target=handle.stop, daemon=True)
        stopper.start()
        stopper.join(HUNG)
        self.assertFalse(stopper.is_alive())

    def test_archives(self):
        self.files.make_dir("/tmp/tree/d")
        self.files.write("/tmp/tree/d/x", "1")
        self.files.write_archive("/tmp/copy", self.files.read_archive("/tmp/tree"))
        self.assertEqual(self.files.read("/tmp/copy/d/x"), "1")

    def test_threads_share_a_sandbox(self):
        errors = []

        def work(n):
            try:
                for i in range(5):
                    self.files.write(f"/tmp/threads/{n}", f"{n} {i}")
                    if self.sandbox.commands.run(f"cat /tmp/threads/{n}").stdout != f"{n} {i}":
                        errors.append(n)
            except Exception as e:
                errors.append(e)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(errors, [])


class Ports(unittest.TestCase):
    def test_without_a_network(self):
        with fresh() as sandbox:
            with self.assertRaises(InvalidArgumentException):
                sandbox.get_host(8000)
            with self.assertRaises(ConflictException):
                sandbox.open_port(8000)

    def test_open_port(self):
        try:
            sandbox = fresh(network="full", ports=[8000])
        except SandboxException as e:
            self.assertEqual(e.code, "unenforceable")  # this host has no network for sandboxes
            return
        with sandbox:
            program = (
                "import socket\n"
                "s = socket.create_server(('127.0.0.1', 8000))\n"
                "print('ready', flush=True)\n"
                "while True:\n"
                "    c, _ = s.accept()\n"
                "    c.sendall(b'hello'); c.sendall(c.recv(100).upper()); c.close()\n"
            )
            ready = threading.Event()
            sandbox.commands.run(
                ["python3", "-c", program], background=True, on_stdout=lambda t: ready.set()
            )
            self.assertTrue(ready.wait(HUNG))
            address, _, port = sandbox.get_host(8000).rpartition(":")
            with socket.create_connection((address, int(port))) as published:
                self.converse(published)
            with sandbox.open_port(8000) as direct:
                self.converse(direct)
            with self.assertRaises(SandboxException):
                sandbox.open_port(8001).close()

    def converse(self, conn):
        conn.settimeout(HUNG)
        conn.sendall(b"x")
        data = b""
        while len(data) < 6:
            piece = conn.recv(100)
            if not piece:
                break
            data += piece
        self.assertEqual(data, b"helloX")
