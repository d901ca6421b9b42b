"""Run a module as a pure function: its copy, its state, the effects of a call, what passes in and out."""
