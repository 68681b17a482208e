"""Let measured trials correct predictions, and choose the next trial: `planner tune`.

May import `runs`, `export` and the packages below them.
"""
