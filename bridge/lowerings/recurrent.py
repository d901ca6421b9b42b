"""One direction of one recurrent layer as a scan."""

import jax
import jax.numpy as jnp
import torch

from bridge.lowerings.registry import lowers

aten = torch.ops.aten


@lowers(aten.mkldnn_rnn_layer.default)
def lstm_layer(
    x, w_input, w_hidden, b_input, b_hidden, h, c, reverse, batch_sizes, mode, size, layers, has_biases, *_settings
):
    """One direction of one LSTM layer over `(time, batch, features)`: what PyTorch's CPU build makes of an LSTM.

    A scan, so that a long sequence compiles once and not once a step. The last output is MKL-DNN's workspace.
    """
    inputs = jnp.einsum("tbf,gf->tbg", x, w_input)
    if has_biases:  # otherwise what stands for them has the shape of the weights
        inputs = inputs + b_input + b_hidden

    def step(state, gates):
        hidden, cell = state
        i, f, g, o = jnp.split(gates + hidden @ w_hidden.T, 4, axis=-1)
        cell = jax.lax.logistic(f) * cell + jax.lax.logistic(i) * jnp.tanh(g)
        hidden = jax.lax.logistic(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    start = tuple(state.reshape(x.shape[1], -1) for state in (h, c))
    (hidden, cell), outputs = jax.lax.scan(step, start, inputs, reverse=bool(reverse))
    return outputs, hidden.reshape(h.shape), cell.reshape(c.shape), jnp.zeros(0, jnp.uint8)
