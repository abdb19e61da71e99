"""A fake of langchain_core.tools, for tests where LangChain cannot be had: only what tools need."""

import tool_protocol


class StructuredTool:
    def __init__(self, function):
        self._function = function
        self.name = function.__name__
        self.description, self._parameters = tool_protocol.describe(function)
        self.args = tool_protocol.schema(self._parameters)["properties"]

    @classmethod
    def from_function(cls, func=None, *, parse_docstring=False):
        if not parse_docstring:
            raise ValueError("the fake takes descriptions of parameters from the docstring only")
        return cls(func)

    def invoke(self, arguments):
        tool_protocol.check(self._parameters, arguments)
        return self._function(**arguments)
