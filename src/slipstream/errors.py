"""The errors Slipstream raises: one hierarchy, each message one line that a user can act on."""


class SlipstreamError(Exception):
    """Something failed; the message is one line a user can act on."""


class UsageError(SlipstreamError, ValueError):
    """Wrong use: the message names the field, the value and what is allowed."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its class if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
