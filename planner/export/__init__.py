"""Write a plan as the configuration of other tools: pure functions from a plan to the text of a file.

`targets/registry.py` lists the targets, each in a module of its own. The keys that a target writes are checked against
a schema generated from the real package (`schema/*.json`); settings that it cannot express are listed in the file. May
import `explain` and the packages below it.
"""
