"""Requests answered with typed values: what commands print, and what Python gets (`planner.suggest` and its like).

One file per command, with a function of its name; serving is in `serve`. May import every package of `planner` but
`commands` and `service`.
"""
