"""Sessions in the shape of LLM Sandbox, with sandboxd as the backend.

    from sandboxd.llm_sandbox import SandboxSession

    with SandboxSession(lang="python") as session:
        print(session.run("print('Hello, World!')").stdout)
"""

from .const import SandboxBackend, SupportedLanguage
from .data import ConsoleOutput, ExecutionResult, FileType, PlotOutput
from .exceptions import SandboxError, SandboxTimeoutError
from .interactive import InteractiveSandboxSession, InteractiveSettings, KernelType
from .pool import (
    ArtifactPooledSandboxSession,
    ContainerPoolManager,
    ExhaustionStrategy,
    PoolConfig,
    PooledSandboxSession,
    create_pool_manager,
)
from .security import RestrictedModule, SecurityIssueSeverity, SecurityPattern, SecurityPolicy
from .session import ArtifactSandboxSession, BaseSession, SandboxSession, create_session

__all__ = [
    "ArtifactPooledSandboxSession",
    "ArtifactSandboxSession",
    "BaseSession",
    "ConsoleOutput",
    "ContainerPoolManager",
    "ExecutionResult",
    "ExhaustionStrategy",
    "FileType",
    "InteractiveSandboxSession",
    "InteractiveSettings",
    "KernelType",
    "PlotOutput",
    "PoolConfig",
    "PooledSandboxSession",
    "RestrictedModule",
    "SandboxBackend",
    "SandboxError",
    "SandboxSession",
    "SandboxTimeoutError",
    "SecurityIssueSeverity",
    "SecurityPattern",
    "SecurityPolicy",
    "SupportedLanguage",
    "create_pool_manager",
    "create_session",
]
