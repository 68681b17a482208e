"""The planner as a service: questions and runs as jobs over HTTP. Needs the extra `service`."""
