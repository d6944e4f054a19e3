"""A property that is computed once, without a lock.

`functools.cached_property` took one until Python 3.12, the same for all objects of a class: it
costs 3 microseconds, makes threads wait for each other, and hangs the child of a fork that happened
while a thread held it. Two threads may compute a value twice here; one of the two is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801 (used as a decorator)
    """Computes a value when it is first asked for, and keeps it in the object."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> T | Self:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
