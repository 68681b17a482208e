"""What is asked: a graph on a mesh, with layouts that are given or pinned, and how collectives may be executed.

May import `layouts/`, `ops/` and `operators/`.
"""
