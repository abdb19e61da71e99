"""The tools of examples/python, in each framework.

A framework that cannot be had is replaced by a fake of its tool protocol, in tests/fakes. An
installed one comes first.
"""

import asyncio
import importlib
import json
import os
import sys
import unittest

from .support import HUNG, fresh

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "..", "..", "examples", "python"))
sys.path.append(os.path.join(HERE, "fakes"))


class Frameworks(unittest.TestCase):
    def works(self, example, name, parameters, call):
        """Checks the tools of an example. name, parameters and call use a tool as its framework does."""
        module = importlib.import_module(example)
        with fresh() as sandbox:
            tools = {name(tool): tool for tool in module.tools(sandbox)}
            self.assertEqual(list(tools), ["run_code", "shell", "read_file", "write_file"])
            self.assertEqual(set(parameters(tools["write_file"])), {"path", "content"})
            self.assertEqual(parameters(tools["shell"])["command"]["description"], "The command line.")

            def use(tool, **arguments):
                return call(tools[tool], arguments)

            self.assertEqual(use("run_code", code="x = 6\nprint('a')"), "a\n")
            self.assertEqual(use("run_code", code="x * 7"), "42")
            self.assertIn("ZeroDivisionError", use("run_code", code="1/0"))
            self.assertEqual(use("write_file", path="/tmp/a/b", content="é\n"), "wrote /tmp/a/b")
            self.assertEqual(use("read_file", path="/tmp/a/b"), "é\n")
            self.assertIn("error: ", use("read_file", path="/tmp/none"))
            self.assertEqual(use("shell", command="cat /tmp/a/b"), "é\n")
            self.assertIn("(exit code 3)", use("shell", command="echo no >&2; exit 3"))
            long = use("shell", command="head -c 100000 /dev/zero | tr '\\0' x")
            self.assertIn("(80000 characters are left out)", long)

    def test_langchain(self):
        self.works("langchain_tools", lambda t: t.name, lambda t: t.args, lambda t, a: t.invoke(a))

    def test_llama_index(self):
        self.works(
            "llama_index_tools",
            lambda t: t.metadata.name,
            lambda t: t.metadata.get_parameters_dict()["properties"],
            lambda t, a: t.call(**a).content,
        )

    def test_openai_agents(self):
        self.works(
            "openai_agents_tools",
            lambda t: t.name,
            lambda t: t.params_json_schema["properties"],
            lambda t, a: asyncio.run(t.on_invoke_tool(None, json.dumps(a))),
        )

    def test_smolagents(self):
        self.works("smolagents_tools", lambda t: t.name, lambda t: t.inputs, lambda t, a: t(**a))

    def test_a_program_that_takes_too_long(self):
        tools = importlib.import_module("sandbox_tools")
        with fresh() as sandbox:
            before, tools.TIMEOUT, said = tools.TIMEOUT, 0.5, ""
            try:
                while "begun" not in said and tools.TIMEOUT < HUNG:  # a start that takes longer is no fault
                    tools.TIMEOUT *= 2
                    said = tools.SandboxTools(sandbox).shell("echo begun; sleep 10000")
            finally:
                tools.TIMEOUT = before
        self.assertIn("begun", said)
        self.assertIn("(ended after", said)
