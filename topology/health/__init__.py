"""Whether a machine is as it should be: expected against found, the time each fault costs, and its remedy.

May import `profile`, `rates` and the modules at the top of `topology`.
"""
