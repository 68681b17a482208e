"""Requests answered with typed values: what commands print, and what Python gets (`planner.suggest` and its like).

One file a command, a function of its name; what it does about serving is in `serve`. May import every package of
`planner` but `commands` and `service`.
"""
