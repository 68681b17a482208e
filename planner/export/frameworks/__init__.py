"""One framework per file: its keys for a plan, and the exported file."""
