"""Kinds of configurations: how each is recognised and read into a `Configuration`, and how its text is edited.

May import `export`, for the tables of keys, and what that may; judging what was read is the folder above.
"""
