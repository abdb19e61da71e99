"""The error of code is a value, not an exception."""
from e2b_code_interpreter import Sandbox

with Sandbox.create() as sbx:
    execution = sbx.run_code("def f():\n    raise ValueError('bad')\nf()")
    print(execution.error.name, execution.error.value)
    print("line 2" in execution.error.traceback)
# prints: ValueError bad
# prints: True
