"""Every admission of ours passes the contract that other packages' are held to."""

from __future__ import annotations

from typing import Any

import pytest

from advisor.policies.admission import BUILT_IN
from advisor.policies.policy_contract import PolicyContract
from advisor.policies.registry import GROUP, PolicyUnknown, checked, policy_named

ADMISSIONS = sorted(BUILT_IN)


@pytest.mark.parametrize("admission", ADMISSIONS)
class TestOurs(PolicyContract):
    @pytest.fixture(autouse=True)
    def _named(self, admission: str) -> None:
        self.admission = admission


def test_unknown_admission_names_those_there_are() -> None:
    with pytest.raises(PolicyUnknown, match=f"'mru' is not known: choose one of always, auto, .*{GROUP}"):
        policy_named("mru")


class Bare:
    eviction = "lru"
    period_s = 0.0
    hurries = True
    duels = False
    replaces_better = True

    def admit(self, candidate: Any, scene: Any) -> Any: ...


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("eviction", "mru", "names the eviction 'mru': choose one of lru"),
        ("period_s", -1.0, "has the period -1.0 s: set it from 0 to 3600"),
    ],
)
def test_policy_of_another_package_that_is_none_is_refused(field: str, value: Any, words: str) -> None:
    policy = Bare()
    setattr(policy, field, value)
    with pytest.raises(PolicyUnknown, match=words):
        checked(policy, "mine", "mine:POLICY")
    with pytest.raises(PolicyUnknown, match="lacks eviction, period_s, hurries, duels, replaces_better, admit"):
        checked(object(), "mine", "mine:POLICY")
