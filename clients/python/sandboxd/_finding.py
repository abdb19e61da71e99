"""Findings of code policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping


@dataclass
class Finding:
    """A place in code that a rule of a code policy is about.

    ``kind`` is "pattern" or "module", and ``name`` the rule's. ``line`` is 0 of a library.
    """

    kind: str
    name: str
    found: str
    line: int
    severity: str
    reason: str
    refused: bool

    @classmethod
    def of(cls, d: Mapping[str, Any]) -> Finding:
        return cls(
            str(d.get("kind", "")),
            str(d.get("name", "")),
            str(d.get("found", "")),
            int(d.get("line") or 0),
            str(d.get("severity", "")),
            str(d.get("reason", "")),
            bool(d.get("refused")),
        )
