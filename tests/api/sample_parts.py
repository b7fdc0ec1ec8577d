"""`AdminParts` over plain values, all of them there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sample_actions import SampleActions
from sample_audit import SampleAudit
from sample_blocks import SampleBlocks
from sample_deletions import SampleDeletions
from sample_plans import SamplePlans
from sample_policies import SamplePolicies
from sample_prefixes import SamplePrefixes
from sample_reader import SampleReader
from sample_recordings import SampleRecordings
from sample_replays import SampleReplays
from sample_usage import SampleUsage
from sample_volumes import SampleVolumes

from advisor.access.doorkeeper import Doorkeeper
from advisor.access.identity import LOCAL
from advisor.api.parts import AdminParts

CONFIG = {"directory": "state", "log": {"url": "postgresql://kv:planted@db/kv"}}
METRICS = b"# TYPE kvadvisor_blocks gauge\nkvadvisor_blocks 7\n"


def sample_parts(**others: Any) -> AdminParts:
    """`others` stand in the place of the samples, by the names of `AdminParts`."""
    parts = AdminParts(
        reader=SampleReader(), metrics=lambda: METRICS, doorkeeper=Doorkeeper(anonymous=LOCAL),
        config=lambda: CONFIG, actions=SampleActions(), plans=SamplePlans(), policies=SamplePolicies(),
        deletions=SampleDeletions(), prefixes=SamplePrefixes(), blocks=SampleBlocks(), audit=SampleAudit(),
        usage=SampleUsage(),
        volumes=SampleVolumes(), recordings=SampleRecordings(), replays=SampleReplays(),
    )
    return replace(parts, **others)
