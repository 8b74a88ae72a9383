"""Checks of arguments that a YAML gives in a mapping which the parser passes on unseen."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def check_arguments(label: str, takes: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Checks names and types of keyword arguments, and that numbers are finite; the rest is for whoever takes them.

    Args:
        label: the mapping's own key, for the message.
        takes: a class or function whose parameters are bool, int, float, str, literals, or unions of these.
        given: the arguments.

    Raises:
        ValueError: there is no such argument, or its value is of another type or not finite.
    """
    parameters = inspect.signature(takes).parameters
    hints = get_type_hints(takes.__init__ if isinstance(takes, type) else takes)  # type: ignore[misc]
    for key, value in given.items():
        if key not in parameters:
            raise ValueError(f"{label}.{key} does not exist; it takes {', '.join(parameters) or 'nothing'}.")
        if not _is_a(value, hints[key]):
            raise ValueError(f"{label}.{key}={value!r} must be of type {parameters[key].annotation}.")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{label}.{key}={value!r} must be finite.")


def _is_a(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(_is_a(value, one) for one in get_args(hint))
    if get_origin(hint) is Literal:
        return type(value) in {type(one) for one in get_args(hint)}
    return type(value) is hint or (hint is float and type(value) is int)
