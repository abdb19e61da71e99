# Calls of docker-py as programs make them. Each check prints a line, and the first that fails ends it.
import io
import sys
import tarfile
import threading
import docker
from docker.errors import APIError, ImageNotFound, NotFound

client = docker.from_env()
IMAGE = "tool:1"


def check(name, got, want=True):
    if got != want:
        sys.exit(f"{name}: got {got!r}, want {want!r}")
    print("ok", name)


def fails(name, error, status, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except error as e:
        check(name, getattr(e, "status_code", None) or e.response.status_code, status)
        return e
    sys.exit(f"{name}: no error")


def tar(**files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as t:
        for name, text in files.items():
            entry = tarfile.TarInfo(name.replace("__", "."))
            entry.size, entry.uid, entry.gid, entry.mode = len(text), 1000, 1000, 0o640
            t.addfile(entry, io.BytesIO(text.encode()))
    return out.getvalue()


check("ping", client.ping())
check("version", client.version()["ApiVersion"], "1.51")
check("info", client.info()["OSType"], "linux")
fails("missing image", ImageNotFound, 404, client.images.get, "nosuch:1")
image = client.images.get(IMAGE)
check("image tags", IMAGE in image.tags)
check("image by id", client.images.get(image.id).id, image.id)
check("image by short id", client.images.get(image.id.split(":")[1][:12]).id, image.id)
check("images", IMAGE in [tag for i in client.images.list() for tag in i.tags])

check("run", client.containers.run(IMAGE, ["echo", "hi"], remove=True), b"hi\n")
try:
    client.containers.run(IMAGE, ["sh", "-c", "echo no >&2; exit 3"], remove=True, stderr=True)
    sys.exit("no ContainerError")
except docker.errors.ContainerError as e:
    check("run that fails", (e.exit_status, e.stderr), (3, b"no\n"))
fails("run without an image", ImageNotFound, 404, client.containers.create, "nosuch:1", "true")

box = client.containers.run(IMAGE, ["sleep", "1000"], detach=True, tty=True, stdin_open=True, name="agent", environment={"A": "b"}, working_dir="/testbed",
                            labels={"long": "x" * 5000})
check("status", client.containers.get("agent").status, "running")
check("by name", client.containers.get("/agent").id, box.id)
check("by prefix", client.containers.get(box.id[:12]).id, box.id)
check("long label", client.containers.get("agent").labels["long"], "x" * 5000)
check("list", [c.name for c in client.containers.list(filters={"name": "agent"})], ["agent"])
check("list by ancestor", [c.name for c in client.containers.list(filters={"ancestor": IMAGE})], ["agent"])
code, out = box.exec_run(["sh", "-c", "echo $A $PWD; exit 5"])
check("exec", (code, out), (5, b"b /testbed\n"))
code, out = box.exec_run(["sh", "-c", "echo out; echo err >&2"], demux=True)
check("exec demux", (code, out), (0, (b"out\n", b"err\n")))
check("exec silent", box.exec_run("true", demux=True).output, (None, None))
check("exec user", box.exec_run(["id", "-u"], user="1000").output, b"1000\n")
code, out = box.exec_run(["nosuch"])
check("exec of nothing", code in (126, 127) and b"executable file not found" in out)
code, out = box.exec_run(["sh", "-c", "yes 0123456789abcde | head -c 20000000"])
check("exec with much output", (code, len(out)), (0, 20000000))
check("exec stream", b"".join(box.exec_run(["sh", "-c", "echo 1; echo 2"], stream=True).output), b"1\n2\n")
check("exec leaves a child", box.exec_run(["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo done"]).output, b"done\n")
check("the child lives", b"sleep 1000" in box.exec_run(["ps"]).output)
results = []
threads = [threading.Thread(target=lambda n=n: results.append(docker.from_env().containers.get("agent").exec_run(["echo", str(n)]).output)) for n in range(16)]
[t.start() for t in threads]
[t.join() for t in threads]
check("execs at once", sorted(results), sorted(f"{n}\n".encode() for n in range(16)))

check("put", box.put_archive("/tmp", tar(a__txt="text")))
check("put owner", box.exec_run(["stat", "-c", "%u:%g %a", "/tmp/a.txt"]).output, b"1000:1000 640\n")
stream, stat = box.get_archive("/tmp/a.txt")
got = tarfile.open(fileobj=io.BytesIO(b"".join(stream)))
check("get", (stat["name"], stat["size"], got.getnames(), got.extractfile("a.txt").read()), ("a.txt", 4, ["a.txt"], b"text"))
stream, stat = box.get_archive("/tmp")
check("get a directory", (tarfile.open(fileobj=io.BytesIO(b"".join(stream))).getnames(), stat["size"] > 0), (["tmp", "tmp/a.txt"], True))
fails("get nothing", NotFound, 404, box.get_archive, "/nosuch")
fails("put nowhere", NotFound, 404, box.put_archive, "/nosuch", tar(a="x"))

committed = box.commit("kept", "2")
check("commit", client.containers.run("kept:2", ["cat", "/tmp/a.txt"], remove=True), b"text")
built, log = client.images.build(fileobj=io.BytesIO(tar(Dockerfile="FROM tool:1\nRUN echo built > /b\nCMD cat /b\n")), custom_context=True, tag="py:1", rm=True)
check("build", (built.tags, client.containers.run("py:1", remove=True)), (["py:1"], b"built\n"))
client.images.remove("py:1")
saved = b"".join(client.images.get("kept:2").save(named=True))
client.images.remove("kept:2")
check("load", [i.tags for i in client.images.load(saved)], [["kept:2"]])

check("logs", box.logs(), b"")
check("stats", box.stats(stream=False)["name"], "/agent")
check("top", box.top()["Titles"][1], "PID")
box.pause()
fails("exec when paused", APIError, 409, box.exec_run, "true")
box.unpause()
box.kill("SIGUSR1")
box.reload()
box.stop(timeout=5)
check("wait", box.wait()["StatusCode"] >= 128)
fails("exec when stopped", APIError, 409, box.exec_run, "true")
check("put when stopped", box.put_archive("/root", tar(later="x")))
box.start()
check("files after a start", box.exec_run(["cat", "/root/later"]).output, b"x")
box.rename("other")
fails("remove when running", APIError, 409, box.remove)
box.remove(force=True)
fails("removed", NotFound, 404, client.containers.get, "agent")
fails("privileged", APIError, 403, client.containers.create, IMAGE, privileged=True)

volume = client.volumes.create("data", labels={"app": "shop"})
check("volume", (volume.name, volume.attrs["Driver"], volume.attrs["Labels"]), ("data", "local", {"app": "shop"}))
check("volume that exists", client.volumes.create("data").attrs["Labels"], {"app": "shop"})
client.containers.run(IMAGE, ["sh", "-c", "echo kept > /data/f"], volumes={"data": {"bind": "/data", "mode": "rw"}}, remove=True)
mounts = [docker.types.Mount("/data", "data", read_only=True), docker.types.Mount("/cache", "cache", labels={"app": "other"}, no_copy=True)]
user = client.containers.run(IMAGE, ["sleep", "1000"], mounts=mounts, volumes=["/anon"], detach=True)
check("volume's file", user.exec_run(["cat", "/data/f"]).output, b"kept\n")
check("read-only volume", user.exec_run(["touch", "/data/x"]).exit_code, 1)
check("mounts", sorted((m["Type"], m["Destination"], m["RW"]) for m in user.attrs["Mounts"]), [("volume", "/anon", True), ("volume", "/cache", True), ("volume", "/data", False)])
check("volumes by label", [v.name for v in client.volumes.list(filters={"label": "app=other"})], ["cache"])
check("dangling volumes", client.volumes.list(filters={"dangling": True}), [])
fails("remove a volume in use", APIError, 409, volume.remove, force=True)
check("disk usage", {v["Name"]: v["UsageData"]["RefCount"] for v in client.df()["Volumes"]}["data"], 1)
user.remove(force=True, v=True)
check("volumes", sorted(v.name for v in client.volumes.list()), ["cache", "data"])
volume.remove()
fails("removed volume", NotFound, 404, client.volumes.get, "data")
fails("volume driver", APIError, 403, client.volumes.create, "x", driver="nfs")
check("prune volumes", client.volumes.prune(filters={"all": True})["VolumesDeleted"], ["cache"])

second = 1000000000
checked = client.containers.run(IMAGE, ["sleep", "1000"], detach=True, healthcheck={"test": ["CMD", "true"], "interval": second, "timeout": 20 * second, "retries": 2})
for event in client.events(since=1, filters={"container": checked.id, "event": "health_status: healthy"}, decode=True):
    check("health event", event["Action"], "health_status: healthy")
    break
checked.reload()
check("health", (checked.attrs["State"]["Health"]["Status"], checked.attrs["State"]["Health"]["Log"][0]["ExitCode"]), ("healthy", 0))
check("healthcheck", checked.attrs["Config"]["Healthcheck"], {"Test": ["CMD", "true"], "Interval": second, "Timeout": 20 * second, "Retries": 2})
check("list by health", [c.id for c in client.containers.list(filters={"health": "healthy"})], [checked.id])
checked.remove(force=True)
check("prune", client.containers.prune()["SpaceReclaimed"], 0)
