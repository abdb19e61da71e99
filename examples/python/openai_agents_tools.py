"""Tools of a sandbox for the OpenAI Agents SDK: pip install openai-agents"""

import sys

from agents import Agent, Runner, function_tool
from sandbox_tools import SandboxTools
from sandboxd import Sandbox


def tools(sandbox):
    return [function_tool(f) for f in SandboxTools(sandbox).all()]


if __name__ == "__main__":
    with Sandbox.create(tie=True) as box:
        agent = Agent(name="worker", instructions="Work in the sandbox.", tools=tools(box))
        print(Runner.run_sync(agent, sys.argv[1]).final_output)
