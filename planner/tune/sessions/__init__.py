"""Tunings as commands begin, resume or submit them: flags, state files and the choice of a runner."""
