"""Runs a module as a pure function: its copy, its state, the effects of a call, arguments and results."""
