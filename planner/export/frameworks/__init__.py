"""One framework a file: how it spells a plan, and the file that is exported for it."""
