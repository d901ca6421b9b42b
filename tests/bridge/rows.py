"""The whole table of meanings: importing this fills it."""

import rows_gradients
import rows_state
import rows_values
from rows_registry import ROWS, TOLERANCE, Row

SUBJECTS = (rows_gradients, rows_state, rows_values)
__all__ = ["ROWS", "SUBJECTS", "TOLERANCE", "Row"]
