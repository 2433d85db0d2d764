"""The check that tests of drafters, heads and quantized models share: drafts change no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream import Result, SpeculativeDecoder


def drafted_as_plain(
    decoder: SpeculativeDecoder, prompts: Sequence[Any], params: Any, *, plain: SpeculativeDecoder | None = None
) -> list[Result]:
    """The results of a batch, whose texts must be those of plain decoding: by `plain`, or over the same models."""
    plain = plain or decoder.using("none", num_draft_tokens="auto")
    results, expected = (each.generate(list(prompts), params) for each in (decoder, plain))
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    return results


def alone_and_together(
    decoder: SpeculativeDecoder, prompts: Sequence[Any], params: Any, *, plain: SpeculativeDecoder | None = None
) -> list[Result]:
    """`drafted_as_plain`; each prompt decoded alone must have the same text, too."""
    results = drafted_as_plain(decoder, prompts, params, plain=plain)
    assert [decoder.generate(prompt, params).token_ids for prompt in prompts] == [r.token_ids for r in results]
    return results
