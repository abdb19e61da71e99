"""Other languages."""
from e2b_code_interpreter import Sandbox

with Sandbox.create() as sbx:
    print(sbx.run_code("echo $((6 * 7))", language="bash").logs.stdout)
# prints: ['42\n']
