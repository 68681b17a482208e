"""Targets of a question: the most load that holds them, and what else would meet those that do not hold."""
