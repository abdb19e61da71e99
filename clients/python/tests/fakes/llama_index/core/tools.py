"""A fake of llama_index.core.tools, for tests where LlamaIndex cannot be had: only what tools need."""

from dataclasses import dataclass
from typing import Any

import tool_protocol


@dataclass
class ToolMetadata:
    name: str
    description: str
    parameters: dict

    def get_parameters_dict(self):
        return self.parameters


@dataclass
class ToolOutput:
    content: str
    tool_name: str
    raw_input: dict
    raw_output: Any


class FunctionTool:
    def __init__(self, fn):
        self._fn = fn
        description, self._parameters = tool_protocol.describe(fn)
        self.metadata = ToolMetadata(fn.__name__, description, tool_protocol.schema(self._parameters))

    @classmethod
    def from_defaults(cls, fn=None):
        return cls(fn)

    def call(self, **arguments):
        tool_protocol.check(self._parameters, arguments)
        output = self._fn(**arguments)
        return ToolOutput(str(output), self.metadata.name, {"kwargs": arguments}, output)
