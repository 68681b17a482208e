"""Why this plan: where its step and memory go, as data and as text.

May import `search` and the packages below it.
"""
