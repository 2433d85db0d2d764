"""The tokens of a forward: what the cache lacks of each row, then its draft, in the shape a model takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.slot_table import SlotTable


@dataclass(frozen=True)
class InputBatch:
    """What the KV cache lacks of some rows up to the end of their drafts.

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

    def padded(self, draft: Tensor, table: SlotTable) -> Tensor:
        """The rectangle, on the model's device; what is about to be cached is audited."""
        inputs = self.rectangle(draft.to(table.backend.device))
        if table.audit:
            for slot, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
                table.audit.write(slot, start, inputs[slot, :count].tolist())
        return inputs

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


def last(logits: Tensor, counts: Sequence[int], keep: int) -> Tensor:
    """The last `keep` of each row's counts[i] real positions. logits: [B, W, V] -> [B, keep, V]."""
    if len(set(counts)) == 1:
        return logits[:, counts[0] - keep : counts[0]]
    first = torch.tensor([count - keep for count in counts])[:, None]
    at = (first + torch.arange(keep)).to(logits.device, non_blocking=True)
    return logits[torch.arange(len(counts), device=logits.device)[:, None], at]
