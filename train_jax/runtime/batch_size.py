"""Batch sizes: the division of a global batch over devices or hosts, and the number of steps in an epoch."""

from train_jax.errors import UserError


def check_divides(batch_size: int, count: int, what: str) -> None:
    """Raises `UserError` unless `count` divides `batch_size`; the message suggests batch sizes and a count.

    The suggested batch sizes are multiples of twice the count, so that they also suit twice as many devices.
    """
    if batch_size < 1:
        raise UserError(f"global batch {batch_size} is not a batch size; use {count} or a multiple of it")
    if batch_size % count == 0:
        return
    step = 2 * count if batch_size > 2 * count else count
    below = batch_size // step * step
    sizes = f"{below} or {below + step}" if below else f"{below + step}"
    divisors = [divisor for divisor in range(1, batch_size + 1) if batch_size % divisor == 0]
    nearest = min(divisors, key=lambda divisor: (abs(divisor - count), -divisor))
    noun = what.removesuffix("s") if nearest == 1 else what
    raise UserError(f"global batch {batch_size} does not divide over {count} {what}; use {sizes}, or {nearest} {noun}")


def epochs_to_steps(per_epoch: float, epochs: float, batch_size: int) -> int:
    """Returns the number of whole steps in `epochs` epochs of `per_epoch` examples. Raises `UserError` if it is 0."""
    steps = int(epochs * per_epoch / batch_size)
    if steps < 1:
        raise UserError(
            f"{epochs} epochs of {per_epoch:.6g} examples are less than one batch of {batch_size}; "
            f"use at least {batch_size / per_epoch:.3g} epochs"
        )
    return steps
