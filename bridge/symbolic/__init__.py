"""What is known of integers while tracing: intervals, positions, and slices whose length depends on data."""
