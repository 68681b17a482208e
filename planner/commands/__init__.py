"""The commands, one per file: parse, ask, print. `planner.cli` loads one when it is used.

May import every other package of `planner`; nothing but the command line imports this one.
"""
