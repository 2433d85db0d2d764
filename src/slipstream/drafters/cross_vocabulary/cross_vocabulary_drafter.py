"""A draft model of another vocabulary: its text is translated, as bytes, into the target's tokens.

With acceptance by `match` a draft is a guess, so any translation leaves the text the target's own. Rules that need the
distribution of a draft get drafts of shared tokens only, sampled from the draft model's renormalized distribution over
them, which is a distribution over the target's tokens (Timor et al., ICML 2025, arXiv 2502.05202, algorithm 4).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.core.interfaces import Drafter, DraftScorer, Sampler
from slipstream.core.rng import argmax
from slipstream.core.types import Draft, Row, Traits
from slipstream.drafters import Setup
from slipstream.drafters.cross_vocabulary.bridged_session import BridgedSession
from slipstream.drafters.cross_vocabulary.continuation import Continuation
from slipstream.drafters.model.model_drafter import ModelDrafter, Stop, extended, record_of, stop_for
from slipstream.errors import UsageError
from slipstream.tokenization.vocabulary_bridge import VocabularyBridge

TRAITS = Traits(has_own_cache=True, default_length=6, needs_draft_model=True, other_vocabulary=True)


class SharedTokens:
    """The tokens that both vocabularies have. V: the size of the target's vocabulary, D: of the draft model's."""

    def __init__(self, bridge: VocabularyBridge, vocab_size: int, device: torch.device) -> None:
        pairs = sorted(bridge.shared.items())
        self.vocab_size = vocab_size
        self.in_target = torch.tensor([target_id for target_id, _ in pairs], dtype=torch.int64, device=device)
        self.in_draft = torch.tensor([draft_id for _, draft_id in pairs], dtype=torch.int64, device=device)
        self.draft_id = torch.zeros(vocab_size, dtype=torch.int64, device=device)
        self.draft_id[self.in_target] = self.in_draft
        size = bridge.draft.head_size
        readable = torch.tensor([text is not None for text in bridge.draft.texts], dtype=torch.bool, device=device)
        readable[self.in_draft] = False
        self.others = readable.nonzero()[:, 0]  # draft tokens whose text is not a token of the target
        self.head_size = size

    def of(self, logits: Tensor) -> Tensor:
        """Logits [..., V] from logits [..., D]: minus infinity where the draft model has no such token."""
        logits = logits.to(self.in_draft.device)
        shared = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        shared[..., self.in_target] = logits[..., self.in_draft]
        return shared


class SharedTokenScorer(DraftScorer):
    """Presents a draft model's session as one over the target's vocabulary; only shared tokens have finite logits."""

    def __init__(self, bridged: BridgedSession, shared: SharedTokens, longest: int) -> None:
        self.backend = bridged.backend
        self._bridged, self._shared, self._longest = bridged, shared, longest
        self._draft_rows: list[Row] = []

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        """Logits over the target's vocabulary, after drafts of shared tokens."""
        if draft.shape[1] == 0:
            self._draft_rows = self._bridged.draft_rows(rows, self._longest)
        fed = self._shared.draft_id[draft.to(self._shared.draft_id.device)]
        self._bridged.note_drafted(rows, fed.tolist())
        return self._shared.of(self._bridged.session.score(self._draft_rows, fed, lengths, keep))

    def keep_drafts(self, lengths: Sequence[int]) -> None:
        self._bridged.session.keep_drafts(lengths)


class SharedTokenDrafter:
    """Samples drafts of shared tokens from the draft model's distribution over them, which becomes `Draft.probs`.

    A row's draft ends where its options exclude all shared tokens: nothing can be sampled there.
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
        num_sampled = sampled.long().cumprod(-1).sum(-1).tolist()
        return replace(draft, probs=probs).cut(num_sampled)


class CrossVocabularyDrafter:
    """Drafts text with the draft model and proposes it in the target's tokens.

    A greedy row gets the draft model's likeliest text. For a sampled row the shared tokens race with the random numbers
    that the target will use at that position; a token that the target lacks is taken if it is likelier than all shared
    tokens together.
    """

    def __init__(self, setup: Setup, bridged: BridgedSession, shared: SharedTokens, stop: Stop | None) -> None:
        self._bridged, self._bridge, self._shared, self._stop = bridged, bridged.bridge, shared, stop
        self._extender, self._steps = setup.extender, min(setup.steps, bridged.longest_draft)

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """Draft as many draft tokens as target tokens are asked for; they may become fewer target tokens."""
        width = min(max(lengths, default=0), self._steps)
        if width == 0:
            return Draft.empty(len(rows), sampler.device)
        texts = [Continuation(self._bridge, row.tokens) for row in rows]
        draft_rows = self._bridged.draft_rows(rows, width)
        chances: list[list[float]] = [[] for _ in rows]
        steps = self._in_one_call(draft_rows, width, texts, sampler) or self._step_by_step(
            draft_rows, lengths, width, texts, chances, sampler
        )
        proposals = [text.tokens()[:length] if length else [] for text, length in zip(texts, lengths, strict=True)]
        draft = replace(Draft.from_lists(proposals, sampler.device), steps=steps)
        token_chances = [
            text.chances(draft_chances)[:n] if n else []
            for text, draft_chances, n in zip(texts, chances, draft.lengths, strict=True)
        ]
        records = [record_of(n, probs) for n, probs in zip(lengths, token_chances, strict=True)]
        learned = None if self._stop is None else self._stop.learned
        if learned is not None:
            chains = [
                extended(self._extender, row, tokens, learned.acceptance_probs(row, probs), n)
                for row, tokens, probs, n in zip(rows, proposals, token_chances, lengths, strict=True)
            ]
            draft = replace(Draft.from_lists([tokens for tokens, _ in chains], sampler.device), steps=steps)
            records = [
                replace(record, acceptance_probs=probs) for record, (_, probs) in zip(records, chains, strict=True)
            ]
        return replace(draft, rows=tuple(records))

    def _in_one_call(
        self, draft_rows: Sequence[Row], width: int, texts: Sequence[Continuation], sampler: Sampler
    ) -> int:
        """Draft greedily without returning to the host; the number of steps, or 0 where that is impossible."""
        if self._stop is not None or not sampler.plain:
            return 0
        drafted = self._bridged.session.draft_greedy(draft_rows, width, self._shared.head_size)
        if drafted is None:
            return 0
        tokens: list[list[int]] = drafted.tolist()
        self._bridged.note_drafted(sampler.rows, tokens)
        for text, line in zip(texts, tokens, strict=True):
            for token in line:
                text.add(token)
        return width

    def _step_by_step(
        self,
        draft_rows: Sequence[Row],
        lengths: Sequence[int],
        width: int,
        texts: Sequence[Continuation],
        chances: list[list[float]],
        sampler: Sampler,
    ) -> int:
        """Draft with a forward per token while a row wants more; returns how many. Fills in `chances`."""
        rows, session, device = sampler.rows, self._bridged.session, self._bridged.backend.device
        drafted: list[list[int]] = [[] for _ in rows]
        draft_lengths = [min(n, width) for n in lengths]
        for j in range(width):
            fed = torch.tensor(drafted, dtype=torch.int64).reshape(len(rows), j).to(device)
            logits = session.score(draft_rows, fed, [j] * len(rows), keep=1)[:, 0].to(sampler.device)
            chosen, probs = self._choose(logits, texts, sampler)
            confidences = probs.tolist() if self._stop is not None else [1.0] * len(rows)
            for i, token in enumerate(chosen.tolist()):
                texts[i].add(token)
                drafted[i].append(token)
                chances[i].append(confidences[i])
            self._bridged.note_drafted(rows, drafted)
            has_ended = [text.is_over for text in texts]
            if self._stop is not None:
                stopped = self._stop.ends(rows, draft_lengths, chances, False)
                has_ended = [a or b for a, b in zip(has_ended, stopped, strict=True)]
            draft_lengths = [min(n, j + 1) if ended else n for n, ended in zip(draft_lengths, has_ended, strict=True)]
            if max(draft_lengths) <= j + 1:
                return j + 1
        return width

    def _choose(self, logits: Tensor, texts: Sequence[Continuation], sampler: Sampler) -> tuple[Tensor, Tensor]:
        """The next token of each row's draft, and its probability. logits: [B, D], the draft model's."""
        if sampler.plain:
            best = argmax(logits)
            if self._stop is None:  # nothing asks how likely they are
                return best, torch.ones(len(best), dtype=torch.float32, device=best.device)
            return best, logits.float().softmax(-1).gather(-1, best[:, None])[:, 0]
        shared, offsets = self._shared, [len(text.tokens()) for text in texts]
        scores = self._scores(shared.of(logits)[:, None], texts, offsets, sampler)
        probs = sampler.probs(scores)[:, 0].nan_to_num(0.0)
        positions = torch.tensor(offsets, dtype=torch.int64).to(sampler.device, non_blocking=True)
        winner = sampler.draw_at(probs, positions, max(offsets)).clamp(min=0)
        temperatures = [max(row.params.temperature, 1e-3) for row in sampler.rows]
        temperature = torch.tensor(temperatures, dtype=torch.float32).to(sampler.device)[:, None]
        total = torch.logsumexp(logits.float() / temperature, -1, keepdim=True)
        # the draft model's probability of all shared tokens together; options may raise their scores beyond its total
        mass = torch.logsumexp(scores[:, 0].clamp(min=-1e30) / temperature, -1, keepdim=True) - total
        mass = mass.exp().clamp(max=1.0)
        chosen, chance = shared.draft_id[winner], mass[:, 0] * probs.gather(-1, winner[:, None])[:, 0]
        if not len(shared.others):
            return chosen, chance
        other, index = ((logits[:, shared.others].float() / temperature - total).exp()).max(-1)
        better = other > mass[:, 0]
        return torch.where(better, shared.others[index], chosen), torch.where(better, other, chance)

    def _scores(
        self, logits: Tensor, texts: Sequence[Continuation], offsets: Sequence[int], sampler: Sampler
    ) -> Tensor:
        """The shared tokens' logits [B, 1, V] under the rows' options, each row after its own draft so far."""
        drafted = Draft.from_lists([text.tokens() for text in texts], sampler.device).tokens
        scores = torch.empty_like(logits, dtype=torch.float32)
        for offset in sorted(set(offsets)):
            rows = [i for i, row_offset in enumerate(offsets) if row_offset == offset]
            scores[rows] = sampler.scores(logits, drafted, first=offset, guess=True)[rows].float()
        return scores


def build(setup: Setup, argument: str) -> Drafter:
    """ "cross_vocabulary", or "cross_vocabulary:p=PERCENT" to stop early.

    The drafter `model` becomes this one if the draft model has another vocabulary.

    Without acceptance by `match` it drafts tokens that both vocabularies have.
    """
    match = re.fullmatch(r"p=(\d{1,2})", argument)
    if argument and match is None:
        raise UsageError(
            f"drafter='cross_vocabulary:{argument}'; allowed: 'cross_vocabulary', or 'cross_vocabulary:p=PERCENT' "
            "from 0 to 99"
        )
    bridged = setup.bridged
    if bridged is None:
        lacking = "; give draft=... (command line: --draft)" if setup.session is None else "; allowed: 'model'"
        raise UsageError(f"drafter='cross_vocabulary' needs a draft model of another vocabulary{lacking}")
    stop = stop_for(setup, match and int(match[1]))
    shared = SharedTokens(bridged.bridge, setup.vocab_size, setup.device)
    if setup.coupled:
        return CrossVocabularyDrafter(setup, bridged, shared, stop)
    if not len(shared.in_target):
        target, draft = bridged.bridge.target.name, bridged.bridge.draft.name
        raise UsageError(
            f"draft {draft!r} shares no token with target {target!r}, so that its drafts have no distribution over the "
            "target's tokens; allowed: acceptance 'auto' or 'match'"
        )
    return SharedTokenDrafter(bridged, shared, stop)
