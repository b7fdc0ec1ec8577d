"""A policy of another package: a tenant's blocks come from the second use, everybody else's from the fourth."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.policies.policy import Candidate, Scene, Verdict


@dataclass(frozen=True)
class PayingTenantsFirst:
    """Pure: what it says follows from the candidate and the scene alone."""

    paying: frozenset[str]
    eviction: str = "lfuda-leaf"
    period_s: float = 10.0
    hurries: bool = True
    duels: bool = False
    replaces_better: bool = False

    def admit(self, candidate: Candidate, scene: Scene) -> Verdict:
        needed = 2 if candidate.tenant in self.paying else 4
        touches = candidate.block.touches
        if touches < needed:
            return Verdict(False, 0.0, f"{touches} uses of {needed} that tenant {candidate.tenant or 'unknown'} needs")
        return Verdict(True, candidate.score, f"{touches} uses, tenant {candidate.tenant or 'unknown'} needs {needed}")


POLICY = PayingTenantsFirst(frozenset({"open", "acme"}))
