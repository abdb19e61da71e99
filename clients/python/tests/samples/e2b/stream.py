"""Stream output, results and errors of code."""
from e2b_code_interpreter import Sandbox

sandbox = Sandbox.create()
sandbox.run_code(
    "import sys\nprint('out')\nprint('err', file=sys.stderr)\n7",
    on_stdout=lambda data: print("stdout:", data),
    on_stderr=lambda data: print("stderr:", data, data.error),
    on_result=lambda result: print("result:", result.text),
)
sandbox.run_code("1/0", on_error=lambda error: print("error:", error.name, error.value))
print(sandbox.kill())
# prints: …stdout: out…
# prints: result: 7
# prints: error: ZeroDivisionError division by zero
# prints: True
