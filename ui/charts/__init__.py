"""Pictures as pure functions: rows in, an altair chart out. Colours come from `planner.palette` and nowhere else."""
