"""Handling of one operation of a traced call: a constant, a view, a write, a draw, or a computation."""
