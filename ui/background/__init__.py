"""Work that pages wait for: worker processes of this machine, and jobs of the service."""
