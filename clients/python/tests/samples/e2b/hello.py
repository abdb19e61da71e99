"""Run code, and read its output."""
from e2b_code_interpreter import Sandbox

with Sandbox.create() as sandbox:
    sandbox.run_code("x = 1")
    execution = sandbox.run_code("x += 1; x")
    print(execution.text)
    print(sandbox.run_code("print('hello')").logs.stdout)
# prints: 2
# prints: ['hello\n']
