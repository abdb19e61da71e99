"""Runs of the agent. tests/pyclient serves the model, which is a fake: it plays fixed turns."""

import os
import unittest

from sandboxd import (
    AgentRun,
    AsyncAgentRun,
    ConflictException,
    FileNotFoundException,
    InvalidArgumentException,
    NotFoundException,
    Sandbox,
)

from .support import asynchronous


def model(turns):
    """Returns the options of a model that plays the turns of a name."""
    return {"model": "scripted", "base_url": os.environ[f"SANDBOXD_TEST_MODEL_{turns}"], "key": "k"}


class Agent(unittest.TestCase):
    def test_a_run_to_its_end(self):
        run = AgentRun.start("what is it?", **model("ANSWER"), budget={"turns": 9})
        events = []
        info = run.wait(on_event=events.append)
        self.assertEqual(
            (info.state, info.exit_reason, info.turns, info.tool_calls), ("ended", "submitted", 2, 2)
        )
        self.assertEqual(info.query, "what is it?")
        self.assertEqual([e.number for e in events], list(range(1, len(events) + 1)))
        kinds = [e.kind for e in events]
        self.assertEqual((kinds[0], kinds[-1]), ("run", "end"))
        self.assertEqual((kinds.count("response"), kinds.count("began")), (2, 2))
        self.assertNotIn("unknown", kinds)
        self.assertEqual(next(e for e in events if e.kind == "response").turn, 1)

        self.assertEqual(run.answer(), "42\n")
        self.assertEqual(run.list_files(), ["answer.txt", "made/by/it"])
        self.assertEqual(run.read_file("made/by/it"), b"\x00\xff")
        self.assertEqual(len(run.trajectory()["steps"]), 2)
        for name in ("../record.jsonl", "/etc/passwd", "made", "none"):
            with self.assertRaises(FileNotFoundException):
                run.read_file(name)

        # Another client finds it, and begins in the middle.
        again = AgentRun.connect(run.run_id)
        self.assertEqual([e.number for e in again.events(start=len(events))], [len(events)])
        self.assertIn(run.run_id, [i.run_id for i in AgentRun.list()])
        self.assertTrue(run.delete())
        self.assertFalse(again.delete())
        with self.assertRaises(NotFoundException):
            AgentRun.connect(run.run_id)

    def test_a_link_that_leads_out_is_not_followed(self):
        run = AgentRun.start("links", **model("LINK"), settings={"output_links": True})
        self.assertEqual(run.wait().exit_reason, "submitted")
        self.assertIn("out", run.list_files())
        with self.assertRaises(FileNotFoundException):
            run.read_file("out")
        self.assertIsNone(run.answer())
        run.delete()

    def test_requests_that_are_wrong(self):
        with self.assertRaises(InvalidArgumentException):
            AgentRun.start("", **model("HANGS"))
        with self.assertRaises(InvalidArgumentException):
            AgentRun.start("x", **model("HANGS"), image="host", settings={"image": "host"})
        with self.assertRaises(InvalidArgumentException):
            AgentRun.start("x", input_dir="/etc", **model("HANGS"))

    @asynchronous
    async def test_a_run_that_is_cancelled(self):
        run = await AsyncAgentRun.start("wait", **model("HANGS"))
        with self.assertRaises(ConflictException):
            await run.delete()
        with self.assertRaises(ConflictException):
            run.trajectory()
        kinds = []

        async def on_event(event):
            kinds.append(event.kind)
            if event.kind == "request":
                await run.cancel(keep=True)

        info = await run.wait(on_event)
        self.assertEqual((info.state, info.exit_reason), ("ended", "interrupted"))
        self.assertEqual(kinds[-1], "end")
        self.assertEqual(Sandbox.get_info(info.sandbox_id).state.value, "stopped")
        with self.assertRaises(InvalidArgumentException):
            await run.resume(settings={"no_such_field": 1})
        await run.resume("Go on.", settings={"model": {"base_url": model("RESUMED")["base_url"]}}, key="k")
        self.assertEqual((await run.wait()).exit_reason, "submitted")
        self.assertEqual(run.answer(), "later\n")
        self.assertTrue(await run.delete())
