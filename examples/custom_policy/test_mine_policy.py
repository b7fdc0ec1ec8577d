"""The policy of this package, held to the contract of policies."""

from advisor.policies.policy_contract import PolicyContract


class TestPayingTenantsFirst(PolicyContract):
    admission = "paying-first"
