"""A plan in the words of other tools: pure functions from a plan to the text of a file.

`registry.py` lists the targets; each has a file of its own. What a target writes is checked against a schema that was
generated from the real package (`schema/*.json`), and what it cannot say it lists.
"""
