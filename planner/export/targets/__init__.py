"""Every target by name, and one plan for all of them in a folder.

May import the rest of `planner.export`; nothing else of it imports this package.
"""
