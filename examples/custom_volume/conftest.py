pytest_plugins = ["storage_agent.volume_contract"]
