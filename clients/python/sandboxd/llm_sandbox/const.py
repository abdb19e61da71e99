"""Names of backends and languages."""

from enum import Enum


class SandboxBackend(str, Enum):
    """Backends that programs name. All of them are sandboxd here: no other runtime is used."""

    DOCKER = "docker"
    KUBERNETES = "kubernetes"
    PODMAN = "podman"
    MICROMAMBA = "micromamba"
    SANDBOXD = "sandboxd"


class SupportedLanguage(str, Enum):
    """Languages of sessions. ``sandboxd.Sandbox.list_languages`` lists what the daemon knows."""

    PYTHON = "python"
    JAVASCRIPT = "javascript"
    TYPESCRIPT = "typescript"
    JAVA = "java"
    CPP = "cpp"
    C = "c"
    GO = "go"
    RUBY = "ruby"
    R = "r"
    BASH = "bash"
