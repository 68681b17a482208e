"""Work in processes of its own: few at a time, bounded in time and memory, ended at once."""
