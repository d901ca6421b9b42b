"""Pallas kernels for TPU, each beside the same function in operations of JAX."""
