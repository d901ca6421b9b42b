"""Checks of hosts, devices, code, data and run folder before a run: each is a function that returns a row."""
