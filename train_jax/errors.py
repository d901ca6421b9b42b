"""The one exception for a user's mistake: one line, exit status 2, never a traceback."""


class UserError(Exception):
    """A mistake in what the user gave: the message names the value, what was expected and the remedy, in one line."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))
