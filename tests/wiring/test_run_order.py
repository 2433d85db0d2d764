"""The order of decoding: the longest rows first, common beginnings together, results in the order of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.scheduler import Scheduler
from slipstream.core.types import Row
from slipstream.wiring.run_order import SHORTEST_BEGINNING, ordered

BEGINNING = [7] * SHORTEST_BEGINNING


def row(index: int, prompt: Sequence[int], max_tokens: int) -> Row:
    return Row(index, list(prompt), SamplingParams(max_tokens=max_tokens), seed=0)


def test_the_longest_rows_run_first_together_with_rows_of_the_same_prefix() -> None:
    rows = [row(0, [1], 5), row(1, [*BEGINNING, 1], 9), row(2, [2], 90), row(3, [*BEGINNING, 2, 3], 60), row(4, [1], 7)]
    assert [item.index for item in ordered(rows, lambda item: item, 1)] == [3, 1, 2, 4, 0]
    # the cache is reused in larger units only
    assert [item.index for item in ordered(rows, lambda item: item, 64)] == [3, 2, 1, 4, 0]
    assert ordered(rows, lambda item: None, 1) == rows


def test_results_keep_the_order_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SpeculativeDecoder("toy", max_batch_size=2)
    prompts, lengths = ["a heron", "the river was", "a sparrow", "the"], [3, 12, 5, 19]
    begun: list[list[int]] = []
    run = Scheduler.run
    monkeypatch.setattr(Scheduler, "run", lambda self, rows: begun.append([r.index for r in rows]) or run(self, rows))
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    together = decoder.generate(prompts, params)
    assert [result.token_ids for result in together] == [
        decoder.generate(prompt, options).token_ids for prompt, options in zip(prompts, params, strict=True)
    ]
    assert [len(result.token_ids) for result in together] == lengths
    assert begun[0] == [1, 3, 2, 0]
    decoder.generate(prompts[:2], params[:2])
    assert begun[-1] == [0, 1]  # all rows begin at once
