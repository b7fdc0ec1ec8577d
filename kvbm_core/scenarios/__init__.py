"""The hierarchy under eviction: seeded workloads served by a real core in virtual time."""
