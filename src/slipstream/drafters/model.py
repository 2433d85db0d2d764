"""A draft model with its own KV cache: greedy for greedy rows, sampled from its distribution for the others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.core.interfaces import Drafter, DraftScorer, Sampler
from slipstream.core.rng import Stream
from slipstream.core.traits import Traits
from slipstream.core.types import Draft, Row
from slipstream.draft_length.early_stop import PathBelow, Stop, TokenBelow, WhilePays
from slipstream.drafters import Setup
from slipstream.errors import UsageError


@dataclass
class ModelDrafter:
    """Samples each draft token from the draft model's distribution under the request's own options.

    vocab_size: the target's; a draft head of another size (padding) is cut or filled with impossible tokens.
    coupled: sample with the random numbers the target will use at that position, for acceptance "match". The token is
    then a function of these numbers alone, so the draft counts as one-hot.
    stop: when a row's draft ends before it has the tokens asked for. The token after which it ends stays in the draft,
    so the end is no choice among tokens and every rule keeps its distribution.
    """

    session: DraftScorer
    vocab_size: int
    coupled: bool = False
    stop: Stop | None = None

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """One forward of the draft model per column; rows that want fewer columns are padded."""
        width, ends = max(lengths, default=0), list(lengths)
        if width and sampler.plain and self.stop is None:
            drafted = self.session.draft_greedy(rows, width, self.vocab_size)
            if drafted is not None:
                return Draft(drafted.to(sampler.device, non_blocking=True), tuple(lengths), steps=width)
        device = self.session.backend.device
        tokens = torch.zeros(len(rows), width, dtype=torch.int64, device=device)
        sampled = not (sampler.all_greedy or self.coupled)
        distributions: list[Tensor] = []
        chances: list[list[float]] = [[] for _ in rows]
        for j in range(width):
            logits = self.session.score(rows, tokens[:, :j], [j] * len(rows), keep=1)
            scores = self._fit(logits).to(sampler.device)
            if sampler.plain:
                chosen = scores[:, 0].argmax(-1)
            else:
                seen = tokens[:, :j].to(sampler.device)
                distributions.append(sampler.probs(sampler.scores(scores, seen, first=j)))
                chosen = sampler.draw(distributions[-1], j, Stream.DRAFT if sampled else Stream.TOKEN)[:, 0]
            tokens[:, j] = chosen
            if self.stop is not None:
                distribution = scores[:, 0].float().softmax(-1) if sampler.plain else distributions[-1][:, 0]
                for row, chance in zip(chances, distribution.gather(-1, chosen[:, None])[:, 0].tolist(), strict=True):
                    row.append(chance)
                over = self.stop.ends(rows, lengths, chances, sampled)
                ends = [min(end, j + 1) if ended else end for end, ended in zip(ends, over, strict=True)]
                if max(ends) <= j + 1:
                    break
        if width:
            self.session.keep_drafts(ends)
        steps, width = (j + 1 if width else 0), max(ends, default=0)
        draft = tokens[:, :width].to(sampler.device, non_blocking=True)
        probs_of = torch.cat(distributions[:width], dim=1) if sampled and distributions else None
        made = Draft(draft, tuple(ends), probs_of, steps=steps)
        return made if sampled or self.stop is None else annotated(made, self.stop, rows, lengths, chances)

    def _fit(self, logits: Tensor) -> Tensor:
        extra = self.vocab_size - logits.shape[-1]
        if extra <= 0:
            return logits[..., : self.vocab_size]
        return torch.nn.functional.pad(logits, (0, extra), value=float("-inf"))


def annotated(
    draft: Draft, stop: Stop, rows: Sequence[Row], asked: Sequence[int], chances: Sequence[Sequence[float]]
) -> Draft:
    """The draft with what `stop` knows of its tokens' acceptance."""
    own = [one[:end] for one, end in zip(chances, draft.lengths, strict=True)]
    probs = tuple(stop.acceptance_probs(row, one) for row, one in zip(rows, own, strict=True))
    notes = tuple(stop.note(length, one) for length, one in zip(asked, own, strict=True))
    return replace(draft, acceptance_probs=probs, notes=notes)


USAGE = "model[:p=PERCENT]"
TRAITS = Traits(
    reads_prompt=True,
    knows_probs=True,
    default_length=6,
    preference=2,
    needs_draft_model=True,
    in_other_engines=True,
)


def build(setup: Setup, argument: str) -> Drafter:
    """The draft model that the decoder was given, as a drafter: "model", or "model:p=PERCENT" to stop early.

    Without an argument it drafts as many tokens as it was told to, and as many as pay where nobody said how many.
    """
    given = re.fullmatch(r"p=(\d{1,2})", argument)
    if argument and given is None:
        raise UsageError(f"drafter='model:{argument}'; allowed: 'model', or 'model:p=PERCENT' from 0 to 99")
    if setup.session is None:
        raise UsageError("drafter='model' needs a draft model; give draft=... (command line: --draft)")
    if setup.bridged is not None:
        from slipstream.drafters import cross_vocabulary

        return cross_vocabulary.build(setup, argument)
    return ModelDrafter(setup.session, setup.vocab_size, setup.coupled, stop_for(setup, given and int(given[1])))


def stop_for(setup: Setup, percent: int | None) -> Stop | None:
    """When a draft model built from this stops. percent: what the user said about its probability, if anything."""
    if percent is not None:
        return PathBelow(percent / 100) if percent else None
    if setup.confidence:
        return TokenBelow(setup.confidence)
    if setup.controller is None or setup.device.type != "cpu":
        return None  # on a GPU waiting for every token's probability costs more than it saves
    return WhilePays(setup.controller)
