"""Which option every operator takes and which layout every tensor has: candidates, policies, the proved choice.

Imports `planner.sharding.problem` and what that imports.
"""
