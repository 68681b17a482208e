"""Pictures as SVG text: pure functions of data, readable on light and dark paper, safe whatever the names hold."""
