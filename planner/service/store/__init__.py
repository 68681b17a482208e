"""Storage of the service: jobs in a database, files on disk by digest."""
