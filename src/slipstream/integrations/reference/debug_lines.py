"""What debug=True prints: one line per round of a row, readable without colour."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.rounds import Round
from slipstream.integrations.reference.call_options import TokenNames


def round_line(done: Round, number: int, tokenizer: TokenNames | None) -> str:
    """Accepted draft tokens, of the main chain and of a branch, rejected ones and the token that followed.

    By name, or by id without a tokenizer.

    "unused" are draft tokens behind the text's end, which were neither accepted nor rejected.
    """
    accepted = done.num_accepted_tokens
    left = "rejected" if done.rejected or done.path is not None else "unused"
    parts = [("accepted", done.tokens[: done.num_in_place]), ("branch", done.tokens[done.num_in_place : accepted])]
    parts.append((left, done.unaccepted))
    parts += [(origin, (token,)) for origin, token in zip(done.origins[accepted:], done.tokens[accepted:], strict=True)]
    words = [f"{what} {_names(tokens, tokenizer)}" for what, tokens in parts if tokens]
    end = [f"end ({done.finish_reason})"] if done.finish_reason else []
    return f"row {done.row} round {number}: {', '.join(words + end)}"


def _names(tokens: Sequence[int], tokenizer: TokenNames | None) -> str:
    return str(list(tokens) if tokenizer is None else tokenizer.convert_ids_to_tokens(list(tokens)))
