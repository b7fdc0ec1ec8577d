"""`kvadvisor warm`: compile what is compiled, at install rather than at the first start."""

from __future__ import annotations

import time

import typer

from advisor.index.jit import cache_folder
from advisor.index.warm import warm as warm_index
from advisor.policies.warm import warm as warm_policies
from advisor.wording import duration_text


def warm() -> None:
    """Compile all kernels and keep them; run it once after an install, as the user who runs the service."""
    started_s = time.perf_counter()
    warm_index()
    warm_policies()
    took = duration_text(time.perf_counter() - started_s)
    folder = cache_folder()
    where = "nothing is kept: no cache folder can be written" if folder is None else f"kept in {folder}"
    typer.echo(f"kernels ready in {took}; {where}")
