"""A serving plan for the engines that people run: commands, a compose file, a Kubernetes deployment."""
