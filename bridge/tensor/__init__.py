"""Memory, autograd identity and views of a traced tensor, and the tensor subclass that code holds."""
