"""Sandboxes of the daemon, by the client for asyncio.

Its modules are the source of the other client, so that this tests what differs: concurrency,
cancellation, and callbacks that are coroutines.
"""

import asyncio
import unittest

from sandboxd import (
    AsyncSandbox,
    CommandExitException,
    FilesystemEventType,
    SandboxNotFoundException,
    SandboxQuery,
    TimeoutException,
)

from .support import asynchronous, image


class Async(unittest.TestCase):
    @asynchronous
    async def test_life(self):
        async with await AsyncSandbox.create(image=image(), tie=True, metadata={"async": "1"}) as sandbox:
            self.assertTrue(await sandbox.is_running())
            found = [i.sandbox_id async for i in AsyncSandbox.list(SandboxQuery(metadata={"async": "1"}))]
            self.assertEqual(found, [sandbox.sandbox_id])
            again = await AsyncSandbox.connect(sandbox.sandbox_id)
            self.assertEqual((await again.commands.run("echo hi")).stdout, "hi\n")
            forks = await sandbox.fork()
            self.assertTrue(await forks[0].kill())
        self.assertFalse(await AsyncSandbox.kill(sandbox.sandbox_id))
        with self.assertRaises(SandboxNotFoundException):
            await AsyncSandbox.get_info(sandbox.sandbox_id)

    @asynchronous
    async def test_commands(self):
        async with await AsyncSandbox.create(image=image(), tie=True) as sandbox:
            pieces = []

            async def keep(text):
                await asyncio.sleep(0)
                pieces.append(text)

            with self.assertRaises(CommandExitException) as caught:
                await sandbox.commands.run("echo a; exit 3", on_stdout=keep)
            self.assertEqual((caught.exception.exit_code, pieces), (3, ["a\n"]))
            with self.assertRaises(TimeoutException):
                await sandbox.commands.run("sleep 100", timeout=0.3)

            came = asyncio.Event()
            handle = await sandbox.commands.run(
                "cat", background=True, stdin=True, on_stdout=lambda text: came.set()
            )
            await handle.send_stdin("x")
            await came.wait()
            await handle.close_stdin()
            self.assertEqual((await handle.wait()).stdout, "x")

            terminal = await sandbox.pty.create(cmd="tty")
            self.assertIn("/dev/pts/", (await terminal.wait()).stdout)

    @asynchronous
    async def test_many_at_once(self):
        async with await AsyncSandbox.create(image=image(), tie=True) as sandbox:
            results = await asyncio.gather(*(sandbox.commands.run(f"echo {i}") for i in range(30)))
            self.assertEqual([r.stdout for r in results], [f"{i}\n" for i in range(30)])

    @asynchronous
    async def test_cancellation_kills_the_command(self):
        async with await AsyncSandbox.create(image=image(), tie=True) as sandbox:
            begun = asyncio.Event()
            task = asyncio.ensure_future(
                sandbox.commands.run("echo a; exec sleep 6543", on_stdout=lambda t: begun.set(), timeout=0)
            )
            await begun.wait()
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            while [p for p in await sandbox.commands.list() if "6543" in " ".join(p.args)]:
                await asyncio.sleep(0.02)

    @asynchronous
    async def test_files(self):
        async with await AsyncSandbox.create(image=image(), tie=True) as sandbox:
            files = sandbox.files
            await files.make_dir("/tmp/w")
            came = asyncio.Event()

            async def on_event(event):
                if event.type is FilesystemEventType.WRITE:
                    came.set()

            watch = await files.watch_dir("/tmp/w", on_event=on_event)
            await files.write("/tmp/w/x", b"abc")
            await came.wait()
            await watch.stop()
            stream = await files.read("/tmp/w/x", format="stream")
            self.assertEqual(b"".join([piece async for piece in stream]), b"abc")
            self.assertEqual([e.name for e in await files.list("/tmp/w")], ["x"])
            await files.remove("/tmp/w")
            self.assertFalse(await files.exists("/tmp/w"))

    @asynchronous
    async def test_code(self):
        async with await AsyncSandbox.create(image=image(), tie=True) as sandbox:
            await sandbox.run_code("x = 41")
            self.assertEqual((await sandbox.run_code("x + 1")).text, "42")
            a, b = await asyncio.gather(sandbox.create_code_context(), sandbox.create_code_context())
            await asyncio.gather(
                sandbox.run_code("x = 1", context=a), sandbox.run_code("x = 2", context=b)
            )
            runs = await asyncio.gather(*(sandbox.run_code("x", context=c) for c in (a, b, None)))
            self.assertEqual([r.text for r in runs], ["1", "2", "41"])

    @asynchronous
    async def test_two_first_runs_have_one_context(self):
        async with await AsyncSandbox.create(image=image(), tie=True) as sandbox:
            await asyncio.gather(sandbox.run_code("x = 1"), sandbox.run_code("y = 2"))
            self.assertEqual((await sandbox.run_code("x + y")).text, "3")
            self.assertEqual(len(await sandbox.list_code_contexts()), 1)
