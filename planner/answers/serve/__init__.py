"""The same requests about serving."""
