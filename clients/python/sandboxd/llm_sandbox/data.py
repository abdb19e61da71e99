"""Results of sessions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import List, Optional


class FileType(str, Enum):
    """The format of a plot."""

    PNG = "png"
    SVG = "svg"
    PDF = "pdf"
    HTML = "html"
    JPEG = "jpeg"


@dataclass
class ConsoleOutput:
    """The outcome of a run or command."""

    exit_code: int = 0
    stderr: str = ""
    stdout: str = ""

    @property
    def text(self) -> str:
        return self.stdout

    def success(self) -> bool:
        """Reports whether the exit code is 0."""
        return self.exit_code == 0


@dataclass
class PlotOutput:
    """A plot that code displayed."""

    format: FileType
    content_base64: str
    width: Optional[int] = None
    height: Optional[int] = None
    dpi: Optional[int] = None


@dataclass
class ExecutionResult(ConsoleOutput):
    """The outcome of a run, with its plots."""

    plots: List[PlotOutput] = field(default_factory=list)
