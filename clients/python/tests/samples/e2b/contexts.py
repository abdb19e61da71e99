"""Contexts are separate."""
from e2b_code_interpreter import Sandbox

sandbox = Sandbox.create()
one = sandbox.create_code_context(cwd="/tmp")
two = sandbox.create_code_context(language="python")
sandbox.run_code("x = 'one'", context=one)
sandbox.run_code("x = 'two'", context=two)
print(sandbox.run_code("x", context=one).text, sandbox.run_code("x", context=two).text)
print(sandbox.run_code("import os; print(os.getcwd())", context=one).logs.stdout)
sandbox.kill()
# prints: one two
# prints: ['/tmp\n']
