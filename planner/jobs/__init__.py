"""Work in separate processes: few at a time, bounded in time and memory, ended at once."""
