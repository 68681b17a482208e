"""How one tensor is sharded over a mesh, and the cheapest redistribution between two layouts.

Imports topology.errors.
"""
