"""Predictions compared with measured runs: signed errors, and interval coverage.

May import `question` and the packages below it.
"""
