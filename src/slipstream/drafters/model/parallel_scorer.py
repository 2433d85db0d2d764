"""A draft model that scores all tokens of a draft in one forward, with mask tokens in place of those to come.

PARD (An et al. 2025, arXiv 2504.18583) trains ordinary models to do that, DFlash trains heads. A token's distribution
depends on the text alone, not on the draft's other tokens; DSpark and DFlash 2 then adjust it to the tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.core.interfaces import DraftScorer
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.types import Row
from slipstream.models.backend_capabilities import ParallelDrafts

MOST = 8  # tokens that a model's forward scores; a longer draft takes another forward, after its own first tokens


class ParallelScorer(DraftScorer):
    """Scores a whole draft at once."""

    def __init__(
        self,
        session: DraftScorer,
        mask_token: int,
        blocks: ParallelDrafts | None = None,
        longest: int = MAX_DRAFT_TOKENS,
    ) -> None:
        """longest: the most tokens of a draft.

        blocks: the session's backend if it is a head that drafts blocks; None for a model or any other head.
        """
        self.backend, self.session = session.backend, session
        self.mask_token, self.blocks = mask_token, blocks
        self.longest = longest if blocks is None else blocks.block_size - blocks.first_place
        self._num_tokens = MOST  # of the draft under way
        # the logits of the last forward, and which token of the draft they begin with
        self._first, self._logits = 0, torch.empty(0, 0, 0)

    def begin(self, width: int) -> int:
        self._num_tokens = min(width, self.longest)
        return self._num_tokens

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        """The logits after the draft's last token, one position: `keep` is 1."""
        drafted = draft.shape[1]
        if not drafted or drafted >= self._first + self._logits.shape[1]:
            blocks = self.blocks
            masks = max(0, min(MOST, self._num_tokens - drafted) - 1) if blocks is None else blocks.block_size - 1
            scored = masks + 1 if blocks is None else self.longest
            inputs = torch.cat([draft, draft.new_full((len(rows), masks), self.mask_token)], 1)
            longer = [length + masks for length in lengths]
            self._first, self._logits = drafted, self.session.score(rows, inputs, longer, keep=scored)
            self.token_ids = self.session.token_ids
            self.session.keep_drafts(lengths)  # the mask tokens in the cache are no text
        place = drafted - self._first
        logits = self._logits[:, place : place + 1]
        return logits if self.blocks is None else self.blocks.chained(logits, [row.tokens[-1] for row in rows], draft)

    def acceptance(self, rows: Sequence[Row], draft: Tensor) -> Tensor | None:
        return None if self.blocks is None else self.blocks.acceptance([row.tokens[-1] for row in rows], draft)

    def keep_drafts(self, lengths: Sequence[int]) -> None:
        self.session.keep_drafts([min(length, self._first) for length in lengths])
