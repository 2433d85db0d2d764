"""A draft model with its own session: greedy for greedy rows, sampled with its law for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.drafters import Setup
from slipstream.noise import Stream
from slipstream.sampling import Sampler
from slipstream.session import Session
from slipstream.types import Draft, Row, UsageError


@dataclass
class ModelDrafter:
    """Draws each draft token from the draft model's law under the request's own options.

    vocab_size: the target's; a draft head of another size (padding) is cut or filled with impossible tokens.
    coupled: draw with the noise the target will use at that position, for acceptance "match". The draw is then a
    function of the dice alone, so the draft counts as one-hot.
    """

    session: Session
    vocab_size: int
    coupled: bool = False

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """One forward of the draft model per column; rows that want fewer columns are padded."""
        width = max(lengths, default=0)
        if width and sampler.plain:
            drafted = self.session.draft_greedy(rows, width, self.vocab_size)
            if drafted is not None:
                return Draft(drafted.to(sampler.device, non_blocking=True), tuple(lengths))
        device = self.session.backend.device
        tokens = torch.zeros(len(rows), width, dtype=torch.int64, device=device)
        sampled = not (sampler.all_greedy or self.coupled)
        laws: list[Tensor] = []
        for j in range(width):
            logits = self.session.score(rows, tokens[:, :j], [j] * len(rows), keep=1)
            scores = self._fit(logits).to(sampler.device)
            if sampler.plain:
                tokens[:, j] = scores[:, 0].argmax(-1)
                continue
            seen = tokens[:, :j].to(sampler.device)
            probs = sampler.probs(sampler.scores(scores, seen, first=j))
            stream = Stream.DRAFT if sampled else Stream.TOKEN
            tokens[:, j] = sampler.draw(probs, first=j, stream=stream)[:, 0]
            laws.append(probs)
        draft = tokens.to(sampler.device, non_blocking=True)
        return Draft(draft, tuple(lengths), torch.cat(laws, dim=1) if sampled and laws else None)

    def _fit(self, logits: Tensor) -> Tensor:
        extra = self.vocab_size - logits.shape[-1]
        if extra <= 0:
            return logits[..., : self.vocab_size]
        return torch.nn.functional.pad(logits, (0, extra), value=float("-inf"))


def build(setup: Setup, argument: str) -> ModelDrafter:
    """A `ModelDrafter` over the draft model that the decoder was given."""
    if argument:
        raise UsageError(f"drafter='model:{argument}'; allowed: 'model' without an argument")
    if setup.session is None:
        raise UsageError("drafter='model' needs a draft model; give draft=... (command line: --draft)")
    return ModelDrafter(setup.session, setup.vocab_size, setup.coupled)
