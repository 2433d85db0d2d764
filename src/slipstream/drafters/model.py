"""A draft model with its own session: greedy for greedy rows, sampled with its law for the others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.drafters import Setup
from slipstream.noise import Stream
from slipstream.sampling import Sampler
from slipstream.session import Session
from slipstream.types import Draft, Row, UsageError

THRESHOLD = 0.4  # where nobody chose


@dataclass
class ModelDrafter:
    """Draws each draft token from the draft model's law under the request's own options.

    vocab_size: the target's; a draft head of another size (padding) is cut or filled with impossible tokens.
    coupled: draw with the noise the target will use at that position, for acceptance "match". The draw is then a
    function of the dice alone, so the draft counts as one-hot.
    threshold: a row's draft ends with the token that takes the draft's own probability of all it drafted below this;
    0 drafts what was asked for. That last token stays in the draft, so the end is no choice among tokens and every
    rule keeps its law. unless_asked: rows whose request says how many tokens to draft do not stop.
    """

    session: Session
    vocab_size: int
    coupled: bool = False
    threshold: float = 0.0
    unless_asked: bool = False

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """One forward of the draft model per column; rows that want fewer columns are padded."""
        width, ends = max(lengths, default=0), list(lengths)
        if width and sampler.plain and not self.threshold:
            drafted = self.session.draft_greedy(rows, width, self.vocab_size)
            if drafted is not None:
                return Draft(drafted.to(sampler.device, non_blocking=True), tuple(lengths))
        device = self.session.backend.device
        tokens = torch.zeros(len(rows), width, dtype=torch.int64, device=device)
        sampled = not (sampler.all_greedy or self.coupled)
        laws: list[Tensor] = []
        path = torch.ones(len(rows), device=sampler.device)  # the draft's probability of what it drafted so far
        for j in range(width):
            logits = self.session.score(rows, tokens[:, :j], [j] * len(rows), keep=1)
            scores = self._fit(logits).to(sampler.device)
            if sampler.plain:
                chosen = scores[:, 0].argmax(-1)
            else:
                seen = tokens[:, :j].to(sampler.device)
                laws.append(sampler.probs(sampler.scores(scores, seen, first=j)))
                chosen = sampler.draw(laws[-1], j, Stream.DRAFT if sampled else Stream.TOKEN)[:, 0]
            tokens[:, j] = chosen
            if self.threshold:
                law = scores[:, 0].float().softmax(-1) if sampler.plain else laws[-1][:, 0]
                path *= law.gather(-1, chosen[:, None])[:, 0]
                ends = [
                    min(end, j + 1) if low else end for end, low in zip(ends, self._unlikely(path, rows), strict=True)
                ]
                if max(ends) <= j + 1:
                    break
        if width:
            self.session.keep_drafts(ends)
        width = max(ends, default=0)
        draft = tokens[:, :width].to(sampler.device, non_blocking=True)
        return Draft(draft, tuple(ends), torch.cat(laws[:width], dim=1) if sampled and laws else None)

    def _unlikely(self, path: Tensor, rows: Sequence[Row]) -> list[bool]:
        low: list[bool] = (path < self.threshold).tolist()
        if not self.unless_asked:
            return low
        return [one and row.params.num_draft_tokens is None for one, row in zip(low, rows, strict=True)]

    def _fit(self, logits: Tensor) -> Tensor:
        extra = self.vocab_size - logits.shape[-1]
        if extra <= 0:
            return logits[..., : self.vocab_size]
        return torch.nn.functional.pad(logits, (0, extra), value=float("-inf"))


def build(setup: Setup, argument: str) -> ModelDrafter:
    """A `ModelDrafter` over the draft model that the decoder was given: "model", or "model:p=PERCENT" to stop early.

    Without an argument it drafts as many tokens as it was told to, and stops early where nobody said how many.
    """
    given = re.fullmatch(r"p=(\d{1,2})", argument)
    if argument and given is None:
        raise UsageError(f"drafter='model:{argument}'; allowed: 'model', or 'model:p=PERCENT' from 0 to 99")
    if setup.session is None:
        raise UsageError("drafter='model' needs a draft model; give draft=... (command line: --draft)")
    threshold = int(given[1]) / 100 if given else THRESHOLD if setup.stops_early else 0.0
    return ModelDrafter(setup.session, setup.vocab_size, setup.coupled, threshold, unless_asked=given is None)
