"""One name for two things: `Sandbox.resume(id)` on the class, `sandbox.resume()` on a sandbox."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
U = TypeVar("U")


class Either(Generic[P, T, Q, U]):
    """A class method where it is asked for on the class, a method where it is asked for on an object."""

    def __init__(self, of_class: Callable[Concatenate[Any, P], T], of_object: Callable[Concatenate[Any, Q], U]) -> None:
        self._of_class = of_class
        self._of_object = of_object
        self.__doc__ = f"{of_class.__doc__}\n\nOn a sandbox: {of_object.__doc__}"

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Callable[P, T]: ...
    @overload
    def __get__(self, instance: object, owner: type[Any]) -> Callable[Q, U]: ...
    def __get__(self, instance: object | None, owner: type[Any]) -> Callable[..., Any]:
        function: Callable[..., Any] = self._of_class if instance is None else self._of_object
        bound = functools.partial(function, owner if instance is None else instance)
        bound.__doc__ = function.__doc__
        return bound
