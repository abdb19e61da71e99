"""A snapshot is a template."""
from e2b import Sandbox

sandbox = Sandbox.create()
sandbox.files.write("/tmp/state", "kept")
snapshot = sandbox.create_snapshot()
copy = Sandbox.create(snapshot.snapshot_id)
print(copy.files.read("/tmp/state"))
copy.kill()
sandbox.kill()
print(Sandbox.delete_snapshot(snapshot.snapshot_id))
# prints: kept
# prints: True
