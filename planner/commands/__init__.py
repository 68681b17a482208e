"""The commands, one a file. Modules here import only typer at the top: `planner --help` loads them all."""
