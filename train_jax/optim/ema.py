"""The exponential moving average of the parameters."""

from train_jax.core.state import Arrays


def update_ema(ema: Arrays, params: Arrays, decay: float) -> Arrays:
    """Updates the moving average of `params`; averages of other parameters do not change."""
    return ema | {name: decay * ema[name] + (1 - decay) * array for name, array in params.items()}
