"""`trm prove`: what the project claims, measured on the devices at hand within a few minutes."""
