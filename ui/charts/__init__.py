"""Altair charts as pure functions of rows. All colours come from `planner.pictures.palette`."""
