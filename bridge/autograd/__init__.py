"""The work of PyTorch's autograd engine besides the chain rule, in a call that JAX differentiates.

`engine`: gradients that the code asks for itself, and `grad`. `function`: `torch.autograd.Function`. `checkpoint`:
`torch.utils.checkpoint`. `nondifferentiable`: operations for which PyTorch has no derivative.
"""
