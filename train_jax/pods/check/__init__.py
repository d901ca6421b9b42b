"""Checks of a run before it is trained and of the devices: each is a function that returns rows."""
