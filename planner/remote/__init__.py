"""A service (`planner service`) from outside: what it is told at its start, what it is asked, and its client."""
