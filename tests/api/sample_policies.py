"""`AdvisorPolicies` over plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sample_reader import SampleReader

from advisor.errors import Outdated
from advisor.policy_views import PolicyPatch
from advisor.views import PoliciesView


class SamplePolicies:
    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], frozenset[str]]] = []

    def change(self, actor: str, patch: PolicyPatch, accepts: Callable[[PoliciesView], bool]) -> PoliciesView:
        view = SampleReader().policies()
        if not accepts(view):
            raise Outdated("the policies were changed meanwhile: GET /api/v1/policies, and send its ETag")
        self.asked.append((actor, patch.changes, patch.back_to_file))
        fields = {name: value for name, value in patch.changes.items() if name != "shadow"}
        policy = view.policy.model_validate({**view.policy.model_dump(), **fields})
        return view.model_copy(update={"policy": policy, "changed_here": sorted(patch.changes)})

    def go_back(self, actor: str) -> PoliciesView:
        self.asked.append((actor, {}, frozenset()))
        return SampleReader().policies()
