"""What makes trials: our executor, any command that trains, or recorded runs."""
