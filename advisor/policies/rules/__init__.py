"""What a policy decides, once: small pure functions of numbers, called by the replay's kernels and by the live planner.

Times are seconds from any fixed origin, ages and gaps seconds, budgets blocks.
"""
