"""The same answers for serving."""
