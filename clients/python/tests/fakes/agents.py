"""A fake of the OpenAI Agents SDK, for tests where it cannot be had: only what tools need."""

import json

import tool_protocol


class FunctionTool:
    def __init__(self, function):
        self._function = function
        self.name = function.__name__
        self.description, self._parameters = tool_protocol.describe(function)
        self.params_json_schema = tool_protocol.schema(self._parameters)

    async def on_invoke_tool(self, context, arguments):
        values = json.loads(arguments)
        tool_protocol.check(self._parameters, values)
        return self._function(**values)


def function_tool(function):
    return FunctionTool(function)


class Agent:
    def __init__(self, name, instructions, tools):
        self.tools = tools


class Runner:
    """Has no model: no test runs an agent."""
