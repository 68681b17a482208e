"""Runs of days and weeks: what failures, restarts and checkpoints leave of their time."""
