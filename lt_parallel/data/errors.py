"""The one error of the data layer, so that a caller can tell a user's mistake in the data from a fault in the code."""


class DataError(ValueError):
    """Text, index files or data options that can't be trained on; the message names the values and the fix."""
