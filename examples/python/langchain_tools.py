"""Tools of a sandbox for LangChain and LangGraph: pip install langchain-core

For an agent: create_agent(model, tools(sandbox)) of package langchain.
"""

from langchain_core.tools import StructuredTool
from sandbox_tools import SandboxTools
from sandboxd import Sandbox


def tools(sandbox):
    return [StructuredTool.from_function(f, parse_docstring=True) for f in SandboxTools(sandbox).all()]


if __name__ == "__main__":
    with Sandbox.create(tie=True) as box:
        by_name = {tool.name: tool for tool in tools(box)}
        print(by_name["run_code"].invoke({"code": "6 * 7"}))
        print(by_name["shell"].invoke({"command": "echo hello"}), end="")
