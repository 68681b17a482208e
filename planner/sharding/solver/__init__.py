"""The choice of an option for every operator and a layout for every tensor: candidates, policies, and the proved
optimum.

Imports `planner.sharding.problem` and what that imports.
"""
