"""A benchmark from Python: what `slipstream bench` measures, with the records as its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slipstream.bench.arms import parse_arms, reference_of
from slipstream.bench.lineup import Lineup, Runner
from slipstream.bench.plan import name_prompts, plan
from slipstream.bench.records import make_header, open_folder
from slipstream.bench.report.report_data import Records, records_of
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import UsageError
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompt_sets import NamedPrompt


def benchmark(
    decoder: SpeculativeDecoder,
    prompts: Sequence[NamedPrompt | str],
    arms: str = "none,auto",
    params: SamplingParams | None = None,
    *,
    reference: str | None = None,
    batch_sizes: Sequence[int] = (1,),
    repeats: int = 3,
    chat: bool = True,
    folder: str | Path | None = None,
) -> Records:
    """Measure arms in turn on the same prompts; prompt number i is sampled with seed + i.

    arms: as `slipstream bench --arms` takes them, such as "none,ngram@7,mymodule:MyDrafter". reference: the arm that
    speed-ups refer to. folder: for `slipstream report`; a finished run in it is not repeated.
    """
    if isinstance(prompts, str):
        raise UsageError(f"prompts={prompts!r:.60}; allowed: a list of prompts")
    params = SamplingParams() if params is None else params
    params = replace(params, seed=params.seed or 0)
    parsed = parse_arms(arms)
    named = name_prompts([NamedPrompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts])
    planned = plan(parsed, named, batch_sizes, repeats)
    if max(batch_sizes) > decoder.config.max_batch_size:
        raise UsageError(
            f"batch_sizes={list(batch_sizes)}; allowed: up to the decoder's max_batch_size, "
            f"{decoder.config.max_batch_size}"
        )
    header = make_header(
        {"target": decoder.target.name, "draft": None if decoder.draft is None else decoder.draft.name},
        parsed,
        named,
        replace(decoder.config, drafter="auto"),
        params,
        reference=reference_of(parsed, reference),
        batch_sizes=list(batch_sizes),
        repeats=repeats,
        chat=chat,
    )
    place = None if folder is None else Path(folder)
    earlier = [] if place is None else open_folder(place, header)
    runs = Runner(Lineup(decoder, parsed, params, chat=chat), planned, place).run(earlier)
    return records_of(header, [*earlier, *runs])
