"""Predictions against measured runs: signed errors, and whether the interval held.

May import `question` and the packages below it.
"""
