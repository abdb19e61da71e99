"""Tools of a sandbox for LlamaIndex: pip install llama-index-core

For an agent: FunctionAgent(tools=tools(sandbox), llm=...) of llama_index.core.agent.workflow.
"""

from llama_index.core.tools import FunctionTool
from sandbox_tools import SandboxTools
from sandboxd import Sandbox


def tools(sandbox):
    return [FunctionTool.from_defaults(fn=f) for f in SandboxTools(sandbox).all()]


if __name__ == "__main__":
    with Sandbox.create(tie=True) as box:
        by_name = {tool.metadata.name: tool for tool in tools(box)}
        print(by_name["run_code"].call(code="6 * 7").content)
        print(by_name["shell"].call(command="echo hello").content, end="")
