"""Files: write, read, list, info, rename, watch, remove."""
from e2b import FilesystemEventType, Sandbox

sandbox = Sandbox.create()
sandbox.files.write("/home/user/my-file", "Hello")
sandbox.files.write_files([
    {"path": "/home/user/a", "data": "aa"},
    {"path": "/home/user/dir/b", "data": b"\x00"},
])
print(sandbox.files.read("/home/user/my-file"))
print([e.name for e in sandbox.files.list("/home/user")])
info = sandbox.files.get_info("/home/user/a")
print(info.name, info.size, info.type.value, info.permissions)
sandbox.files.rename("/home/user/a", "/home/user/c")
print(sandbox.files.exists("/home/user/a"), sandbox.files.exists("/home/user/c"))
handle = sandbox.files.watch_dir("/home/user")
sandbox.files.write("/home/user/my-file", "again")
events = []
while not events:
    events = handle.get_new_events()
print(events[0].name, events[0].type == FilesystemEventType.WRITE)
handle.stop()
print(sandbox.files.make_dir("/home/user/dir"), sandbox.files.make_dir("/home/user/new"))
sandbox.files.remove("/home/user/dir")
print(sandbox.files.exists("/home/user/dir/b"))
sandbox.kill()
# prints: Hello
# prints: ['a', 'dir', 'my-file']
# prints: a 2 file -rw-r--r--
# prints: False True
# prints: my-file True
# prints: False True
# prints: False
