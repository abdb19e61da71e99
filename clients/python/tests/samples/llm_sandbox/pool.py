"""A pool, from several threads."""
from concurrent.futures import ThreadPoolExecutor

from llm_sandbox import SandboxSession
from llm_sandbox.pool import PoolConfig, create_pool_manager

pool = create_pool_manager(
    backend="docker", config=PoolConfig(max_pool_size=3, min_pool_size=1, enable_prewarming=True), lang="python"
)
try:

    def work(n):
        with SandboxSession(lang="python", pool=pool) as session:
            return session.run(f"print({n} ** 2)").stdout.strip()

    with ThreadPoolExecutor(3) as executor:
        print(list(executor.map(work, range(6))))
    print(pool.get_stats()["max_size"])
finally:
    pool.close()
# prints: ['0', '1', '4', '9', '16', '25']
# prints: 3
