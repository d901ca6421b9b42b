"""Private names of PyTorch, torchax and JAX, one file each. No other file of the bridge uses a private name."""
