"""The KV block manager: blocks over device, host and registered volumes, and the events of the first two.

Knows event_plane, kernels and storage_agent's port; never the advisor.
"""
