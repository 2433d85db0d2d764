"""What a forward is fed: token ids in the order and the shape it takes them. This module knows no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.backends import Piece


@dataclass(frozen=True)
class Feed:
    """What the memory lacks of some rows up to the end of their drafts.

    missing[i]: committed tokens, to be written from position starts[i] on; behind them stand the draft's columns from
    number fed[i] on, `drafted` in all. width: of the forward, padding included, if all rows take as much.
    """

    starts: list[int]
    missing: list[list[int]]
    fed: list[int]
    drafted: int
    width: int

    @property
    def counts(self) -> list[int]:
        """Real columns of each row if all rows take the whole width of the draft."""
        return [len(tail) + self.drafted - skip for tail, skip in zip(self.missing, self.fed, strict=True)]

    def rectangle(self, draft: Tensor) -> Tensor:
        """[B, width] token ids: what each row lacks, then its draft [B, K], then padding."""
        device, count, width = draft.device, self.drafted, self.width
        shift = [skip - len(tail) for tail, skip in zip(self.missing, self.fed, strict=True)]  # from input to draft
        table = [[by, *tail, *[0] * (width - len(tail))] for by, tail in zip(shift, self.missing, strict=True)]
        columns = torch.tensor(table, dtype=torch.int64).to(device, non_blocking=True)
        inputs = columns[:, 1:]
        if not count:
            return inputs
        if len(set(shift)) == 1:
            inputs[:, len(self.missing[0]) : count - shift[0]] = draft[:, self.fed[0] :]
            return inputs
        source = torch.arange(width, device=device) + columns[:, :1]
        drafted = draft.gather(1, source.clamp(0, count - 1))
        return torch.where((source >= 0) & (source < count), drafted, inputs)

    def texts(self, draft: Tensor, lengths: Sequence[int]) -> list[list[int]]:
        """The same without padding, of row i's draft the first lengths[i] tokens."""
        parts = zip(self.missing, draft.tolist(), self.fed, lengths, strict=True)
        return [[*tail, *drafted[skip:length]] for tail, drafted, skip, length in parts]


def end_to_end(texts: Sequence[Sequence[int]], total: int) -> Tensor:
    """[total] token ids of several texts, one behind the other, then padding."""
    tokens = [token for text in texts for token in text]
    return torch.tensor(tokens + [0] * (total - len(tokens)), dtype=torch.int64)


def last(logits: Tensor, counts: Sequence[int], keep: int) -> Tensor:
    """The last `keep` of each row's counts[i] real positions. logits: [B, W, V] -> [B, keep, V]."""
    if len(set(counts)) == 1:
        return logits[:, counts[0] - keep : counts[0]]
    first = torch.tensor([count - keep for count in counts])[:, None]
    at = (first + torch.arange(keep)).to(logits.device, non_blocking=True)
    return logits[torch.arange(len(counts), device=logits.device)[:, None], at]


def last_of_each(logits: Tensor, counts: Sequence[int], wanted: Sequence[int], most: int) -> Tensor:
    """The last wanted[i] of row i's counts[i] positions, then its last one again. logits: [T, V] -> [B, most, V]."""
    ends = torch.tensor(counts).cumsum(0)
    own = torch.tensor(wanted)[:, None]
    columns = torch.minimum(torch.arange(most), own - 1)
    return logits[ends[:, None] - own + columns]


def portions(needs: Sequence[Piece], most: int) -> Iterator[list[Piece]]:
    """The pieces in their order, cut and put together into forwards of `most` tokens."""
    portion: list[Piece] = []
    room = most
    for need in needs:
        start, end = need.start, need.start + need.count
        while start < end:
            count = min(room, end - start)
            portion.append(Piece(need.slot, start, count))
            start, room = start + count, room - count
            if not room:
                yield portion
                portion, room = [], most
    if portion:
        yield portion
