"""Integers that are known while tracing: intervals, positions, and slices whose length depends on data."""
