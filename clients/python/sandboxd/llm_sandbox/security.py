"""Advisory checks of code.

They are a seat belt, not a wall: text patterns find careless code, and a program that wants to hide
from them does. What holds a program is the sandbox.
"""

from __future__ import annotations

import io
import re
import tokenize
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Dict, List, Optional, Tuple

from .exceptions import InvalidRegexPatternError


class SecurityIssueSeverity(IntEnum):
    """How grave a finding is."""

    SAFE = 0
    LOW = 1
    MEDIUM = 2
    HIGH = 3


@dataclass
class SecurityPattern:
    """A regular expression that code should not match."""

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


#: Expressions that import NAME, by language.
_IMPORTS: Dict[str, Tuple[str, ...]] = {
    "python": (
        r"^[ \t]*import[ \t]+(?:[\w.]+(?:[ \t]+as[ \t]+\w+)?[ \t]*,[ \t]*)*NAME\b",
        r"^[ \t]*from[ \t]+NAME\b",
        r"(?:__import__|import_module)\(\s*['\"]NAME\b",
    ),
    "javascript": (
        r"require\(\s*['\"`](?:node:)?NAME['\"`/]",
        r"\bfrom\s*['\"](?:node:)?NAME['\"/]",
        r"\bimport\s*\(?\s*['\"`](?:node:)?NAME['\"`/]",
    ),
    "java": (r"^\s*import\s+(?:static\s+)?NAME\b",),
    "cpp": (r"^\s*#\s*include\s*[<\"]NAME[>\"]",),
    "go": (r"^\s*(?:import\s+)?(?:[\w.]+\s+)?\"NAME\"", r"\bimport\s*\([^)]*\"NAME\""),
    "ruby": (r"\brequire(?:_relative)?\s*\(?\s*['\"]NAME['\"/]", r"\bload\s*\(?\s*['\"]NAME\b"),
    "r": (r"\b(?:library|require|requireNamespace|loadNamespace)\(\s*['\"]?NAME\b", r"\bNAME::"),
}
_IMPORTS["typescript"] = _IMPORTS["javascript"]
_IMPORTS["c"] = _IMPORTS["cpp"]

_COMMENTS = {
    "ruby": r"#[^\n]*",
    "r": r"#[^\n]*",
    "bash": r"(?m)(?:^|(?<=\s))#[^\n]*",
}
_C_COMMENTS = r"//[^\n]*|/\*.*?\*/"


def without_comments(code: str, lang: str) -> str:
    """Returns code without its comments. Python's are found by Python's own tokenizer."""
    if lang == "python":
        try:
            return _python(code)
        except (tokenize.TokenError, SyntaxError, ValueError):
            return code  # it does not compile: then nothing of it is a comment for sure
    pattern = _COMMENTS.get(lang, _C_COMMENTS)
    # A string is matched first, and kept: "http://x" holds no comment.
    strings = r"(\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
    return re.sub(f"{strings}|(?s:{pattern})" if "(?m)" not in pattern else f"{strings}|{pattern[4:]}",
                  lambda m: m.group(1) or "", code, flags=re.MULTILINE)


def _python(code: str) -> str:
    lines = code.splitlines(keepends=True)
    comments = []
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            comments.append((token.start, token.end))
    for (row, start), (_, end) in reversed(comments):
        line = lines[row - 1]
        lines[row - 1] = line[:start] + line[end:]
    return "".join(lines)


def check(code: str, lang: str, policy: Optional[SecurityPolicy]) -> Tuple[bool, List[SecurityPattern]]:
    """Reports whether a policy allows code, and all that it found."""
    if policy is None:
        return True, []
    text = without_comments(code, lang)
    found = []
    for p in policy.patterns:
        if re.search(p.pattern, text):
            found.append(p)
    for module in policy.restricted_modules:
        for template in _IMPORTS.get(lang, ()):
            expression = template.replace("NAME", re.escape(module.name))
            if re.search(expression, text, re.MULTILINE):
                found.append(SecurityPattern(expression, module.description or module.name, module.severity))
                break
    least = max(policy.severity_threshold, SecurityIssueSeverity.LOW)
    return not any(p.severity >= least for p in found), found
