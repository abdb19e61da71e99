"""Methods that are called on an object, or on its class with the object's id."""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional


class class_method_variant:
    """Decorates a method: called on the class, the class method of the other name runs instead.

    ``sandbox.kill()`` and ``Sandbox.kill("c4f1b7a09d2e")`` are one name so.
    """

    def __init__(self, class_method: str) -> None:
        self._class_method = class_method
        self._method: Optional[Callable[..., Any]] = None

    def __call__(self, method: Callable[..., Any]) -> Any:
        self._method = method
        self.__doc__ = method.__doc__
        return self

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        assert self._method is not None
        if instance is None:
            return getattr(owner, self._class_method)
        return functools.partial(self._method, instance)
