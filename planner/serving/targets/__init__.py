"""Targets of a question: the most load within them, and changes that meet targets that do not hold."""
