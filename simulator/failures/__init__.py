"""Long runs with failures, restarts and checkpoints: expected times, and the share of time that counts."""
