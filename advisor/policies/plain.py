"""The shared rules as Python calls them: what is compiled for kernels alone has no way in from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from advisor.policies.rules import admission, eviction

F = TypeVar("F", bound=Callable[..., Any])


def _plain(function: F) -> F:
    plain: F = getattr(function, "py_func", function)
    return plain


touched_enough = _plain(admission.touched_enough)
remembered = _plain(admission.remembered)
affordable = _plain(admission.affordable)
eviction_key = _plain(eviction.eviction_key)
inflation_of = _plain(eviction.inflation_of)
