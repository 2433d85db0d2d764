"""Drafters that know the target's text, so that drafts are accepted as far as a check needs them to be.

The drafter under test may be right too rarely for its rule or the engine ever to see a long draft accepted. These
drafters also record what the target computed, as observers of its verdicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from slipstream.certificate.sampled_law import Place, place_of
from slipstream.core.interfaces import Sampler
from slipstream.core.rng import Stream
from slipstream.core.types import Draft, Row, Traits, Verdict


@dataclass
class PlannedDrafts:
    """Drafts each prompt's known text with a mistake, so that each number of tokens is accepted about as often.

    Without texts it drafts nothing: plain decoding, with the logits recorded.
    """

    texts: Mapping[tuple[int, ...], Sequence[int]] = field(default_factory=dict)
    vocab_size: int = 0
    siblings: int = 0  # further tokens at each level of a tree
    traits: Traits = field(default=Traits(samples=False, needs_forwards=False))
    logits: dict[tuple[tuple[int, ...], int], bytes] = field(default_factory=dict)  # digests by prompt and position
    accepted: Counter[int] = field(default_factory=Counter)  # drafts by the number of tokens accepted
    lengths: Counter[int] = field(default_factory=Counter)  # drafts by their number of tokens
    _planned: Counter[int] = field(default_factory=Counter, init=False)  # drafts by the number of tokens that are right

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        drafts = [self._drafted(row, length, in_batch=len(rows) > 1) for row, length in zip(rows, lengths, strict=True)]
        chains = Draft.from_lists([tokens for tokens, _ in drafts], sampler.device)
        if not (self.siblings and sampler.branching):
            return chains
        return Draft(chains.tokens, chains.lengths, parents=tuple(tuple(parents) for _, parents in drafts))

    def _drafted(self, row: Row, length: int, *, in_batch: bool) -> tuple[list[int], list[int]]:
        """A row's tokens and their parents. In a batch the rows' drafts have different lengths."""
        text = self.texts.get(tuple(row.tokens[: row.prompt_length]))
        if text is None or not length:
            return [], []
        turn = self._planned.total()
        if in_batch or turn % 2:  # every length occurs, for each may take another forward
            length = 1 + turn // 2 % length
        levels = max(1, length // (1 + self.siblings))
        # the depth planned least often, long ones first
        right = min(range(levels, -1, -1), key=self._planned.__getitem__)
        self._planned[right] += 1
        path = [*text[row.num_output_tokens :][:levels]]
        path += [0] * (levels - len(path))
        tokens, parents, last = list[int](), list[int](), -1
        mistakes = [1 + (turn + other) % (self.vocab_size - 1) for other in range(1 + self.siblings)]  # none is 0
        for level, token in enumerate(path):
            children = [(token + wrong) % self.vocab_size for wrong in mistakes]
            place = (level + turn) % len(children)
            if level != right:
                children[place] = token
            children = children[: length - len(tokens)]
            parents += [last] * len(children)
            last = len(tokens) + min(place, len(children) - 1)
            tokens += children
        return tokens, parents

    def observe(self, rows: Sequence[Row], draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        counts = verdict.accepted.tolist()
        paths = None if verdict.path is None else verdict.path.tolist()
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if draft.lengths[i]:
                self.accepted[count] += 1
                self.lengths[draft.lengths[i]] += 1
            nodes = range(count) if paths is None else paths[i][:count]
            prompt = tuple(row.tokens[: row.prompt_length])
            for offset, column in enumerate([0, *(node + 1 for node in nodes)]):
                bits = logits[i, column].contiguous().view(torch.uint8).cpu().numpy()
                self.logits[prompt, row.num_output_tokens + offset] = blake2b(bits.tobytes(), digest_size=16).digest()


@dataclass
class LikelyDrafts:
    """Samples each token from a distribution near the target's own along its likeliest text.

    After a token that is not the likeliest, drafts are often rejected: any distribution is right for a draft if the
    rule is told which it was.
    """

    near: Mapping[Place, Sequence[Tensor]]  # by prompt and options: the distribution [V] at each position of the text
    traits: Traits = field(default=Traits(needs_forwards=False))

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        width = max(lengths)
        if not width:
            return Draft.empty(len(rows), sampler.device)
        tables = []
        for row in rows:
            near = self.near[place_of(row)][row.num_output_tokens :][:width]
            tables.append(torch.stack([*near, *[near[-1]] * (width - len(near))]))
        probs = torch.stack(tables).to(sampler.device)
        return Draft(sampler.draw(probs, stream=Stream.DRAFT), tuple(lengths), probs)
