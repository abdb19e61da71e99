"""The server's SDK has the shape of E2B's."""
from e2b_code_interpreter import Sandbox

sandbox = Sandbox.create()
execution = sandbox.run_code("print('a'); 1 + 1")
print(execution.logs.stdout, execution.results[0].text, execution.error)
print(sandbox.is_running())
with open("data.txt", "w") as f:
    f.write("x")
sandbox.files.make_dir("/data")
print(sandbox.upload_file("data.txt", "/data/data.txt"))
print([f.name for f in sandbox.list_files("/data")], sandbox.download_file("/data/data.txt"))
sandbox.close()
print(sandbox.is_running())
# prints: ['a\n'] 2 None
# prints: True
# prints: /data/data.txt
# prints: ['data.txt'] b'x'
# prints: False
