"""Preparing runs on TPU pods without a TPU: compilation for a topology, and what the compiled program tells."""
