"""What the service keeps: jobs in a database, files on disk by digest."""
