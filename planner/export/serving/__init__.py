"""Write a serving plan for serving engines: commands, a compose file, a Kubernetes deployment."""
