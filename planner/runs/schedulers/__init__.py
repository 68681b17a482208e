"""One scheduler a file: how it takes a job, says how the job stands, and ends it."""
