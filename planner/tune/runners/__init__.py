"""Runners of trials: our executor, any training command, a job scheduler, or recorded runs."""
