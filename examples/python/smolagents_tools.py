"""Tools of a sandbox for smolagents: pip install smolagents

For an agent: ToolCallingAgent(tools=tools(sandbox), model=...). A CodeAgent runs the code that it
writes in the process of the agent, and only what it passes to these tools in the sandbox.
"""

import inspect

from sandbox_tools import SandboxTools
from sandboxd import Sandbox
from smolagents import Tool


class SandboxTool(Tool):
    """A function as a tool. Its parameters are texts."""

    output_type = "string"
    skip_forward_signature_validation = True  # forward is another function in each object

    def __init__(self, function):
        description, _, parameters = inspect.getdoc(function).partition("\n\nArgs:\n")
        self.name = function.__name__
        self.description = description
        self.inputs = {}
        for line in parameters.splitlines():
            name, _, text = line.strip().partition(": ")
            self.inputs[name] = {"type": "string", "description": text}
        self.forward = function
        super().__init__()


def tools(sandbox):
    return [SandboxTool(f) for f in SandboxTools(sandbox).all()]


if __name__ == "__main__":
    with Sandbox.create(tie=True) as box:
        by_name = {tool.name: tool for tool in tools(box)}
        print(by_name["run_code"](code="6 * 7"))
        print(by_name["shell"](command="echo hello"), end="")
