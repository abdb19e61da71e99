"""Policies of code, which the daemon enforces before each run.

They are a seat belt, not a wall: they find careless code, and a program that wants to hide from
them does. What holds a program is the sandbox.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Dict, List, Union

from .._finding import Finding
from .exceptions import InvalidRegexPatternError


class SecurityIssueSeverity(IntEnum):
    """How grave a finding is."""

    SAFE = 0
    LOW = 1
    MEDIUM = 2
    HIGH = 3


@dataclass
class SecurityPattern:
    """A regular expression that code should not match, in the syntax that RE2 and Python share."""

    pattern: str
    description: str = ""
    severity: SecurityIssueSeverity = SecurityIssueSeverity.MEDIUM

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as e:
            raise InvalidRegexPatternError(self.pattern) from e


@dataclass
class RestrictedModule:
    """A module that code should not import."""

    name: str
    description: str = ""
    severity: SecurityIssueSeverity = SecurityIssueSeverity.MEDIUM


@dataclass
class SecurityPolicy:
    """Patterns and modules, and the severity from which on a finding fails the check.

    With the threshold SAFE every finding of a severity above SAFE fails.
    """

    severity_threshold: SecurityIssueSeverity = SecurityIssueSeverity.SAFE
    patterns: List[SecurityPattern] = field(default_factory=list)
    restricted_modules: List[RestrictedModule] = field(default_factory=list)

    def add_pattern(self, pattern: SecurityPattern) -> None:
        self.patterns.append(pattern)

    def add_restricted_module(self, module: RestrictedModule) -> None:
        self.restricted_modules.append(module)

    def document(self) -> str:
        """Returns the policy as the daemon reads it: see docs/guides/code-policy.md."""
        return json.dumps(
            {
                "version": 1,
                "refuse": _name(self.severity_threshold),
                "patterns": [
                    {"pattern": p.pattern, **_about(p)} for p in self.patterns if p.severity > 0
                ],
                "modules": [
                    {"module": m.name, **_about(m)} for m in self.restricted_modules if m.severity > 0
                ],
            }
        )

    def violation(self, finding: Finding) -> SecurityPattern:
        """Returns the pattern of a finding; for a module one of its name."""
        for p in self.patterns:
            if finding.kind == "pattern" and finding.name == p.pattern:
                return p
        for m in self.restricted_modules:
            if finding.kind == "module" and finding.name == m.name:
                return SecurityPattern(re.escape(m.name), m.description or m.name, m.severity)
        # Of the daemon's own policy, whose patterns need not be Python's.
        severity = {"low": 1, "medium": 2}.get(finding.severity, 3)
        return SecurityPattern(
            re.escape(finding.name), finding.reason or finding.name, SecurityIssueSeverity(severity)
        )


def _name(severity: SecurityIssueSeverity) -> str:
    return SecurityIssueSeverity(max(severity, SecurityIssueSeverity.LOW)).name.lower()


def _about(rule: Union[SecurityPattern, RestrictedModule]) -> Dict[str, str]:
    about = {"severity": _name(rule.severity)}
    reason = "".join(c if c.isprintable() else " " for c in rule.description)
    reason = reason.encode("utf-8", "replace")[:200].decode("utf-8", "ignore")
    if reason:
        about["reason"] = reason
    return about
