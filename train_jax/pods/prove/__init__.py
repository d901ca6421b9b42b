"""`trm prove`: measures the claims of the project on the present devices within a few minutes."""
