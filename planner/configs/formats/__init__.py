"""Kinds of configurations: how each is recognised and read into a `Configuration`, and how its text is edited.

May import `export`, for the tables of keys, and what that may; the folder above judges what was read.
"""
