"""The tokens that two vocabularies share: a draft model's logits over the target's tokens, and drafts of these alone.

Drafts sampled from the draft model's distribution over the shared tokens, renormalised, have a distribution over the
target's tokens, which `block` and `rejection` need (Timor et al., ICML 2025, arXiv 2502.05202, algorithm 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.core.interfaces import Backend, Sampler
from slipstream.core.types import Draft, Row
from slipstream.draft_length.early_stop import Stop
from slipstream.drafters.cross_vocabulary.bridged_session import BridgedSession
from slipstream.drafters.model import ModelDrafter
from slipstream.models.vocabulary_bridge import VocabularyBridge


class SharedTokens:
    """Which of the draft model's tokens are tokens of the target. V: the target's vocabulary, D: the draft model's."""

    def __init__(self, bridge: VocabularyBridge, vocab_size: int, device: torch.device) -> None:
        pairs = sorted(bridge.shared.items())
        self.vocab_size = vocab_size
        self.in_target = torch.tensor([mine for mine, _ in pairs], dtype=torch.int64, device=device)
        self.in_draft = torch.tensor([theirs for _, theirs in pairs], dtype=torch.int64, device=device)
        self.draft_id = torch.zeros(vocab_size, dtype=torch.int64, device=device)
        self.draft_id[self.in_target] = self.in_draft
        size = bridge.draft.head_size
        readable = torch.tensor([text is not None for text in bridge.draft.texts], dtype=torch.bool, device=device)
        readable[self.in_draft] = False
        self.others = readable.nonzero()[:, 0]  # texts that are no token of the target
        self.head_size = size

    def of(self, logits: Tensor) -> Tensor:
        """Logits [..., V] from logits [..., D]: minus infinity where the draft model has no such token."""
        logits = logits.to(self.in_draft.device)
        shared = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        shared[..., self.in_target] = logits[..., self.in_draft]
        return shared


class SharedTokenScorer:
    """A draft model's session as one over the target's vocabulary, of which it knows the shared tokens."""

    def __init__(self, bridged: BridgedSession, shared: SharedTokens, longest: int) -> None:
        self._bridged, self._shared, self._longest = bridged, shared, longest
        self._own: list[Row] = []

    @property
    def backend(self) -> Backend:
        """The draft model."""
        return self._bridged.backend

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        """See `DraftScorer.score`: logits over the target's vocabulary, after drafts of shared tokens."""
        if draft.shape[1] == 0:
            self._own = self._bridged.draft_rows(rows, self._longest)
        fed = self._shared.draft_id[draft.to(self._shared.draft_id.device)]
        self._bridged.note_drafted(rows, fed.tolist())
        return self._shared.of(self._bridged.session.score(self._own, fed, lengths, keep))

    def draft_greedy(self, rows: Sequence[Row], steps: int, vocab_size: int) -> Tensor | None:
        """Not in one call: the likeliest token may be none of the shared ones."""
        return None

    def keep_drafts(self, lengths: Sequence[int]) -> None:
        """See `DraftScorer.keep_drafts`."""
        self._bridged.session.keep_drafts(lengths)


class SharedTokenDrafter:
    """Samples drafts of shared tokens from the draft model's distribution over them, which the draft carries.

    A row's draft ends where its options leave none of these tokens: nothing was sampled there.
    """

    def __init__(self, bridged: BridgedSession, shared: SharedTokens, stop: Stop | None) -> None:
        self._longest = bridged.longest_draft
        scorer = SharedTokenScorer(bridged, shared, self._longest)
        self._drafter = ModelDrafter(scorer, shared.vocab_size, coupled=False, stop=stop)

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """As many shared tokens as asked for; one forward of the draft model per column."""
        draft = self._drafter.propose(rows, [min(n, self._longest) for n in lengths], sampler)
        if draft.probs is None:
            return draft
        probs = draft.probs.nan_to_num(0.0)
        sampled = probs.gather(-1, draft.tokens[..., None])[..., 0] > 0
        whole = sampled.long().cumprod(-1).sum(-1).tolist()
        return replace(draft, probs=probs).cut(whole)
