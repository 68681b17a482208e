"""One scheduler per file: how it accepts a job, reports its state, and ends it."""
