"""Synthetic workloads: described in TOML, told as requests of a trace or as the events of an engine that served them.

Pure and seeded: the same description and seed give the same requests.
"""

from advisor.simulation.requests import SimulatedRequest, simulate_requests
from advisor.simulation.workload import PRESETS, Workload, WorkloadError, load_preset, load_workload

__all__ = [
    "PRESETS",
    "SimulatedRequest",
    "Workload",
    "WorkloadError",
    "load_preset",
    "load_workload",
    "simulate_requests",
]
