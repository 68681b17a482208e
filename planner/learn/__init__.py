"""What runs with measured time and memory teach of the runtime that made them, and which runs would teach most."""
