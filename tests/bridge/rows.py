"""The whole table of meanings: importing this fills it."""

import re

import rows_gradients
import rows_state
import rows_values
from rows_registry import ROWS, TOLERANCE, Row

SUBJECTS = (rows_gradients, rows_state, rows_values)
__all__ = ["ROWS", "SUBJECTS", "TOLERANCE", "Row", "in_words"]


def in_words(name: str) -> str:
    """Returns the name of a row as the table of the docs has it."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower()
