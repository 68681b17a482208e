"""A service (`planner service`) from outside: its settings, its requests, and its client."""
