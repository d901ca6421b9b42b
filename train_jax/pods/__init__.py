"""Preparing runs on TPU pods without a TPU: compilation for a topology, and the analysis of the compiled program."""
