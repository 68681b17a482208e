"""A service (`planner service`) from outside: the settings it starts with, what it is asked, and its client."""
