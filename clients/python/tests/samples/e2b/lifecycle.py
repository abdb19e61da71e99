"""Timeouts, metadata, connecting again, listing."""
from e2b import Sandbox, SandboxQuery, SandboxState

sandbox = Sandbox.create(timeout=60, metadata={"userID": "123"})
sandbox.set_timeout(30)
info = sandbox.get_info()
print(info.state == SandboxState.RUNNING, info.metadata, info.end_at > info.started_at)
paginator = Sandbox.list(query=SandboxQuery(metadata={"userID": "123"}))
found = paginator.next_items()
print(found[0].sandbox_id == sandbox.sandbox_id, paginator.has_next)
same = Sandbox.connect(sandbox.sandbox_id)
same.files.write("/tmp/x", "1")
print(sandbox.files.read("/tmp/x"), sandbox.is_running())
print(Sandbox.kill(sandbox.sandbox_id), sandbox.is_running())
# prints: True {'userID': '123'} True
# prints: True False
# prints: 1 True
# prints: True False
