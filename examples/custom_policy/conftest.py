pytest_plugins = ["advisor.policies.policy_contract"]
