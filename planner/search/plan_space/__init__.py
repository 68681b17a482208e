"""The space of legal plans: enumerate it, prune it, and find its best plans by the analytical model.

May import `question` and the packages below it.
"""
