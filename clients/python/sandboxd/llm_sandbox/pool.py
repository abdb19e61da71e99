"""Pools of sandboxes.

A sandbox of a pool is used once: whoever acquires one gets a fresh one, and after use it is deleted.
Libraries are installed once, into a snapshot that all sandboxes of the pool begin with.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from enum import Enum
from typing import Any, Dict, List, Optional, Sequence

from .._sync._sandbox import Sandbox
from ..exceptions import SandboxException
from .exceptions import DuplicateClientError, PoolClosedError, PoolExhaustedError, ValidationError
from .session import ArtifactSandboxSession, BaseSession, SandboxSession, _Errors


class ExhaustionStrategy(str, Enum):
    """What acquire does when all sandboxes are in use."""

    WAIT = "wait"
    FAIL_FAST = "fail_fast"
    TEMPORARY = "temporary"  # one more, which does not count


@dataclass
class PoolConfig:
    """Sizes and times of a pool, in seconds.

    ``max_container_uses`` is accepted: a sandbox is used once in any case. ``health_check_interval``
    is accepted: a sandbox is checked when it is acquired.
    """

    max_pool_size: int = 10
    min_pool_size: int = 0
    idle_timeout: Optional[float] = 300
    acquisition_timeout: Optional[float] = 30
    health_check_interval: float = 60
    max_container_lifetime: Optional[float] = 3600
    max_container_uses: Optional[int] = None
    exhaustion_strategy: ExhaustionStrategy = ExhaustionStrategy.WAIT
    enable_prewarming: bool = True

    def __post_init__(self) -> None:
        if self.max_pool_size < 1 or not 0 <= self.min_pool_size <= self.max_pool_size:
            raise ValidationError(
                f"a pool of {self.min_pool_size} to {self.max_pool_size} sandboxes: there is at least one"
            )
        self.exhaustion_strategy = ExhaustionStrategy(self.exhaustion_strategy)


class PoolManager:
    """A pool of sandboxes of one kind. Threads may share it."""

    def __init__(self, config: Optional[PoolConfig] = None, **options: Any) -> None:
        self.config = config or PoolConfig()
        self._options = options
        # It is never opened: it holds what a session of this kind creates.
        self._pattern = BaseSession(**{k: v for k, v in options.items() if k != "libraries"})
        libraries = list(options.get("libraries") or [])
        self._idle: List[Sandbox] = []
        self._made: Dict[str, float] = {}
        self._busy: Dict[str, Sandbox] = {}
        self._creating = 0
        self._closed = False
        self._changed = threading.Condition()
        self._fillers: List[threading.Thread] = []
        self._snapshot: Optional[str] = None
        self._base: Dict[str, Any] = dict(self._pattern._create)
        if self.config.max_container_lifetime:
            self._base["timeout"] = min(self._base["timeout"], self.config.max_container_lifetime)
        if libraries:
            self._prepare(libraries)
        if self.config.enable_prewarming:
            try:
                for _ in range(self.config.min_pool_size):
                    self._idle.append(self._create())
            except BaseException:
                self.close()
                raise

    @property
    def lang(self) -> str:
        return self._pattern.lang

    def _prepare(self, libraries: List[str]) -> None:
        """Installs libraries into a snapshot, with a network; the pool's sandboxes need none."""
        with BaseSession(**self._options) as session:
            with _Errors(self.lang):
                self._snapshot = session.sandbox.create_snapshot().snapshot_id
        self._base.update(image=None, snapshot=self._snapshot)
        # Without a network of its own a sandbox would have that of the snapshot's.
        self._base.setdefault("network", "none")

    def _create(self) -> Sandbox:
        with _Errors(self.lang):
            sandbox = Sandbox.create(tie=True, **self._base)
            try:
                sandbox.files.make_dir(self._pattern.workdir)
            except BaseException:
                sandbox.kill()
                raise
        self._made[sandbox.sandbox_id] = time.monotonic()
        return sandbox

    def _total(self) -> int:
        return len(self._idle) + len(self._busy) + self._creating

    def acquire(self, timeout: Optional[float] = None) -> Sandbox:
        """Returns a fresh sandbox. ``release`` deletes it."""
        limit = self.config.acquisition_timeout if timeout is None else timeout
        deadline = None if limit is None else time.monotonic() + limit
        with self._changed:
            while True:
                if self._closed:
                    raise PoolClosedError("The pool is closed")
                while self._idle:
                    sandbox = self._idle.pop(0)
                    if self._usable(sandbox):
                        self._busy[sandbox.sandbox_id] = sandbox
                        self._refill()
                        return sandbox
                if len(self._busy) + self._creating < self.config.max_pool_size:
                    break
                if self.config.exhaustion_strategy is ExhaustionStrategy.FAIL_FAST:
                    raise PoolExhaustedError(f"All {self.config.max_pool_size} sandboxes are in use")
                if self.config.exhaustion_strategy is ExhaustionStrategy.TEMPORARY:
                    break
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or not self._changed.wait(left):
                    raise PoolExhaustedError(f"No sandbox became free within {limit:g} s")
            self._creating += 1
        try:
            sandbox = self._create()
        except BaseException:
            with self._changed:
                self._creating -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._creating -= 1
            if not self._closed:
                self._busy[sandbox.sandbox_id] = sandbox
                self._refill()
                return sandbox
        self._delete(sandbox)
        raise PoolClosedError("The pool is closed")

    def _usable(self, sandbox: Sandbox) -> bool:
        """Reports whether an idle sandbox runs and is young enough; otherwise it is deleted."""
        age = time.monotonic() - self._made.get(sandbox.sandbox_id, 0)
        idle = self.config.idle_timeout
        try:
            if (not idle or age < idle) and sandbox.is_running():
                return True
        except SandboxException:
            pass
        self._delete(sandbox)
        return False

    def _delete(self, sandbox: Sandbox) -> None:
        self._made.pop(sandbox.sandbox_id, None)
        try:
            sandbox.kill()
        except SandboxException:
            pass  # its tie, which kill closes in any case, deletes it

    def release(self, sandbox: Sandbox) -> None:
        """Deletes a sandbox that acquire returned."""
        with self._changed:
            self._busy.pop(sandbox.sandbox_id, None)
        self._delete(sandbox)
        with self._changed:
            self._changed.notify()

    def _refill(self) -> None:
        """Starts a thread that makes the pool as large as its minimum. Its caller has the lock."""
        self._fillers = [t for t in self._fillers if t.is_alive()]
        if not self.config.enable_prewarming or len(self._idle) + self._creating >= self.config.min_pool_size:
            return
        if self._total() >= self.config.max_pool_size:
            return
        self._creating += 1
        thread = threading.Thread(target=self._fill, name="sandboxd-pool", daemon=True)
        self._fillers.append(thread)
        thread.start()

    def _fill(self) -> None:
        sandbox: Optional[Sandbox] = None
        try:
            sandbox = self._create()
        except Exception:
            pass  # acquire creates one itself then, and reports the error
        with self._changed:
            self._creating -= 1
            if sandbox is not None and not self._closed:
                self._idle.append(sandbox)
                sandbox = None
            self._changed.notify()
        if sandbox is not None:
            self._delete(sandbox)

    def get_stats(self) -> Dict[str, Any]:
        """Returns sizes, and the number of sandboxes in each state."""
        with self._changed:
            return {
                "total_size": self._total(),
                "max_size": self.config.max_pool_size,
                "min_size": self.config.min_pool_size,
                "state_counts": {
                    "initializing": self._creating,
                    "idle": len(self._idle),
                    "busy": len(self._busy),
                    "unhealthy": 0,
                    "removing": 0,
                },
                "closed": self._closed,
            }

    def close(self) -> None:
        """Deletes every sandbox of the pool, also those in use."""
        with self._changed:
            self._closed = True
            left = self._idle + list(self._busy.values())
            self._idle, self._busy = [], {}
            self._changed.notify_all()
            fillers = self._fillers[:]
        for sandbox in left:
            self._delete(sandbox)
        for thread in fillers:
            thread.join()
        if self._snapshot is not None:
            with _Errors(self.lang):
                Sandbox.delete_snapshot(self._snapshot, socket=self._base.get("socket"))
            self._snapshot = None

    def __enter__(self) -> "PoolManager":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


#: The name that LLM Sandbox has for it.
ContainerPoolManager = PoolManager


def create_pool_manager(backend: Any = "sandboxd", config: Optional[PoolConfig] = None, **options: Any) -> PoolManager:
    """Returns a pool: its options are those of a session."""
    return PoolManager(config, backend=backend, **options)


class _Pooled:
    """A session whose sandbox is one of a pool. It is mixed into sessions."""

    _pool: PoolManager
    _sandbox: Optional[Sandbox]

    def _take(self, args: Sequence[Any], options: Dict[str, Any]) -> Dict[str, Any]:
        """Returns the arguments of a session, from those of a pooled one."""
        options = dict(options)
        pool = options.pop("pool", None)
        for arg in args:
            if isinstance(arg, PoolManager) and pool is None:
                pool = arg
            elif "lang" not in options:
                options["lang"] = arg
            else:
                raise ValidationError(f"{arg!r}: name this argument")
        if not isinstance(pool, PoolManager):
            raise ValidationError("a pooled session needs a pool")
        if options.get("client") is not None:
            raise DuplicateClientError("pool and client: give one of them")
        self._pool = pool
        known = {k: v for k, v in pool._options.items() if k in ("workdir", "security_policy", "default_timeout")}
        return {**known, "lang": pool.lang, **options}

    def open(self) -> None:
        if self._sandbox is None:
            self._sandbox = self._pool.acquire()

    def close(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            self._pool.release(sandbox)


class PooledSandboxSession(_Pooled, SandboxSession):
    """A session with a sandbox of a pool, its first argument or ``pool``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(**self._take(args, options))


class ArtifactPooledSandboxSession(_Pooled, ArtifactSandboxSession):
    """A session with plots and a sandbox of a pool, its first argument or ``pool``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(**self._take(args, options))
