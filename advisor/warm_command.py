"""`kvadvisor warm`: compile what is compiled, at install rather than at the first start."""

from __future__ import annotations

import multiprocessing
import time
from typing import Annotated

import typer

from advisor.index.jit import cache_folder
from advisor.index.warm import warm as warm_index
from advisor.policies.warm import warm as warm_policies
from advisor.prefixes.warm import warm as warm_prefixes
from advisor.replay_warm import warm_caches, warm_served, warm_tiers
from advisor.wording import duration_text


def warm(
    replays: Annotated[bool, typer.Option("--replays", help="Also what replays of traces need.")] = False,
) -> None:
    """Compile all kernels and keep them; run it once after an install, as the user who runs the service."""
    started_s = time.perf_counter()
    beside = multiprocessing.get_context("spawn").Process(target=_warm_replays)
    if replays:
        beside.start()
    warm_index()
    warm_policies()
    warm_prefixes()
    if replays:
        beside.join()
        if beside.exitcode:
            raise typer.Exit(beside.exitcode)
    took = duration_text(time.perf_counter() - started_s)
    folder = cache_folder()
    where = "nothing is kept: no cache folder can be written" if folder is None else f"kept in {folder}"
    typer.echo(f"kernels ready in {took}; {where}")


def _warm_replays() -> None:
    warm_tiers()
    warm_caches()
    warm_served()
