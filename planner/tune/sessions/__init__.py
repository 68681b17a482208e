"""A tuning as it is begun, continued and handed to a scheduler: flags, state files and what makes trials put
together.
"""
