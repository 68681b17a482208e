"""The problem: a graph on a mesh, with layouts that are given or pinned, and allowed ways to execute collectives.

May import `layouts/`, `ops/` and `operators/`.
"""
