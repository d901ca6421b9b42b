"""The hooks of a run: what is done between its steps, one subject in each file."""
