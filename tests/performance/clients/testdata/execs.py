# 64 execs on 16 threads, each with its output, in the container that is the argument. Prints the
# seconds that all of them took.
import concurrent.futures
import sys
import time

import docker

client = docker.from_env(max_pool_size=16)
container = client.containers.get(sys.argv[1])


def one(i):
    code, out = container.exec_run(["echo", str(i)])
    assert code == 0 and out == f"{i}\n".encode(), (code, out)


with concurrent.futures.ThreadPoolExecutor(16) as pool:
    begun = time.monotonic()
    list(pool.map(one, range(64)))
    print(time.monotonic() - begun)
