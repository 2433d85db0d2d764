"""From logits to the distribution a request asked for, and draws from it.

Constraints come first; the rest has the order of Hugging Face `generate`: bias, penalties, bad words, minimum length,
the request's own processors; then, unless greedy, temperature, top-k, top-p, min-p. Position j of a row sees the
committed tokens plus the first j draft tokens. This module knows neither models nor acceptance.

Shapes: B rows, J positions, V vocabulary. `first` is the number of draft tokens that precede position 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from slipstream.core.rng import Race, Stream, WarpOptions, Words, absorb, absorbed, argmax, key, words
from slipstream.core.rounds import depths
from slipstream.core.trees import path_to
from slipstream.core.types import Draft, Row
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import KINDS, params_of
from slipstream.sampling.warpers import Warp

NONE = -1  # sampled where no token is left; harmless after a rejection, an error if committed
# scores made into distributions at once: as many as fit a CPU's cache, or a GPU's memory
HOST_BLOCK, DEVICE_BLOCK = 1 << 18, 1 << 27
_WARPED = attrgetter(*(field.name for field in fields(WarpOptions)))


class Sampler:
    """The sampling options of the rows of one batch, as tensors; another one is made whenever the rows change."""

    def __init__(self, rows: Sequence[Row], race: Race, vocab_size: int, device: torch.device) -> None:
        self.rows = list(rows)
        self.race, self.vocab_size, self.device = race, vocab_size, device
        self.all_greedy = all(row.params.temperature == 0 for row in rows)
        self._groups = list(_groups(self.rows, device))
        temperatures = [params_of(row).temperature for row in rows]
        self._temperatures = torch.tensor(temperatures, dtype=torch.float32, device=device)
        self._seeds: dict[Stream, Words] = {}
        self._token_seeds = [key(row.seed, Stream.TOKEN) for row in self.rows]
        processors = [kind(self.rows, vocab_size, device) for kind in KINDS]
        self._processors = [processor for processor in processors if processor.active]
        self.changes_logits = bool(self._processors)
        self.plain = self.all_greedy and not self.changes_logits
        self.branching = not any(processor.may_fail for processor in self._processors)

    @property
    def failures(self) -> dict[int, tuple[int, Exception]]:
        """Rows whose processors failed: index in the batch -> the first such position, the exception."""
        failures = [failure for processor in self._processors for failure in processor.failures.items()]
        return dict(sorted(failures, key=lambda failure: -failure[1][0]))  # a row's first failure overwrites later ones

    def drafted(self) -> None:
        """Forget failures on a draft model's logits: verification calls the processors again, on the target's."""
        for processor in self._processors:
            processor.drafted()

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        """Note the tokens that row number `row` of this batch has committed."""
        for processor in self._processors:
            processor.advance(row, tokens)

    def scores(self, logits: Tensor, draft: Tensor, first: int = 0, *, guess: bool = False) -> Tensor:
        """Logits after all logits processors, in float32; without processors the logits unchanged, in their own type.

        logits: [B, J, V]; draft: [B, >= first + J - 1]. guess: the draft's text may still become other tokens, so the
        request's own processors, which may fail, are skipped.
        """
        processors = [processor for processor in self._processors if not (guess and processor.may_fail)]
        if not processors:
            return logits
        scores = logits.to(torch.float32, copy=True)
        for processor in processors:
            processor.apply(scores, draft, first)
        return scores

    def probs(self, scores: Tensor) -> Tensor:
        """The distribution at each position, float32 [B, J, V]: one-hot for greedy rows."""
        scores = scores.float()
        if self.all_greedy:
            return _one_hot(scores)
        blocks = list(self._blocks(scores.shape[1]))
        if len(blocks) == 1 and isinstance(blocks[0][1], slice):
            return self._distribution(blocks[0][0], scores)
        covered = all(isinstance(rows, slice) for _, rows in blocks)
        probs = torch.empty_like(scores) if covered else _one_hot(scores)
        for warp, rows in blocks:
            probs[rows] = self._distribution(warp, scores[rows])
        return probs

    def choose(self, logits: Tensor, draft: Draft) -> Tensor:
        """The target's own token after the committed tokens and after each draft token, [B, K + 1].

        On a CPU a sampled row gets NONE after every draft token that the target would not have chosen.
        """
        if self.plain:
            return argmax(logits)
        if draft.parents is not None and self.changes_logits:
            scores = self._node_scores(logits, draft)
        else:
            scores = self.scores(logits, draft.tokens)
        chosen = (self._choose_on_path if self.device.type == "cpu" else self._choose_everywhere)(scores, draft)
        if draft.parents is not None and self.failures:
            self._follow(chosen.tolist(), draft)
        return chosen

    def _choose_everywhere(self, scores: Tensor, draft: Draft) -> Tensor:
        scores = scores.float()
        # [B, J] bits of the noise of each position
        keys = self.race.bits(self._keys(Stream.TOKEN, range(scores.shape[1]))) if self._groups else None
        if keys is not None and draft.parents is not None:
            offsets = [[0, *(1 + depth for depth in depths(parents))] for parents in draft.parents]
            padded = torch.tensor([[*row, *[0] * (scores.shape[1] - len(row))] for row in offsets], dtype=torch.int64)
            keys = keys.gather(1, padded.to(keys.device, non_blocking=True))
        blocks = list(self._blocks(scores.shape[1]))
        covered = bool(blocks) and all(isinstance(rows, slice) for _, rows in blocks)
        chosen = scores.new_empty(scores.shape[:2], dtype=torch.int64) if covered else _greedy(scores)
        for warp, rows in blocks:
            assert keys is not None
            picked = scores[rows]
            chosen[rows] = self._drawn(warp, picked.flatten(0, 1), keys[rows].flatten()).view(picked.shape[:2])
        return chosen

    def _choose_on_path(self, scores: Tensor, draft: Draft) -> Tensor:
        sampled = {row for _, members in self._groups for row in members.tolist()}
        chosen, tokens = [[NONE] * scores.shape[1] for _ in self.rows], draft.tokens.tolist()
        if greedy := [row for row in range(len(self.rows)) if row not in sampled]:
            for row, best in zip(greedy, _greedy(scores[greedy]).tolist(), strict=True):
                chosen[row] = best
        # rows whose draft is right so far -> number of its last right token; -1: the one before the draft
        nodes, depth = dict.fromkeys(sampled, -1), 0
        while nodes:
            for warp, rows in self._path_blocks(nodes):
                picked = [scores[row, nodes[row] + 1] for row in rows]
                keys = [self._token_key(row, depth) for row in rows]
                for row, winner in zip(rows, self._winners(warp, picked, keys), strict=True):
                    node, parents = nodes[row], draft.parents[row] if draft.parents else range(-1, draft.width - 1)
                    chosen[row][node + 1] = winner
                    children = range(node + 1, draft.lengths[row])
                    right = (n for n in children if parents[n] == node and tokens[row][n] == winner)
                    nodes[row] = next(right, NONE)
            nodes, depth = {row: node for row, node in nodes.items() if node != NONE}, depth + 1
        return torch.tensor(chosen, device=scores.device)

    def _path_blocks(self, rows: Collection[int]) -> Iterator[tuple[Warp, list[int]]]:
        """These rows, grouped by equal options, in blocks that fit a CPU's cache."""
        at_once = max(1, HOST_BLOCK // self.vocab_size)
        for warp, members in self._groups:
            group = [row for row in members.tolist() if row in rows]
            for start in range(0, len(group), at_once):
                yield warp, group[start : start + at_once]

    def _winners(self, warp: Warp, scores: Sequence[Tensor], keys: Sequence[int]) -> list[int]:
        """`_drawn` for several scores [V]; computes a distribution only where the race has no sure winner."""
        winners = [self.race.sure_winner(*place, warp.options) for place in zip(scores, keys, strict=True)]
        if unsure := [i for i, winner in enumerate(winners) if winner is None]:
            bits = self.race.bits(words([keys[i] for i in unsure]))
            drawn = iter(self._drawn(warp, torch.stack([scores[i] for i in unsure]).float(), bits).tolist())
        return [next(drawn) if winner is None else winner for winner in winners]

    def _drawn(self, warp: Warp, scores: Tensor, keys: Tensor) -> Tensor:
        """[N] tokens from scores [N, V] and the noise of their positions [N]; NONE where no token is possible."""
        distributions = warp(scores)
        winners = self.race.draw(distributions, keys)
        # a token without probability wins only where none has any; NaN is no probability
        return winners.where(distributions.gather(-1, winners[:, None])[:, 0] > 0, NONE)

    def _follow(self, chosen: Sequence[Sequence[int]], draft: Draft) -> None:
        """Forget the failures in a tree that are not on the accepted path. chosen: [B, K + 1] tokens."""
        assert draft.parents is not None
        for i in list(self.failures):
            tokens, path = draft.tokens[i].tolist(), [-1]
            while (token := chosen[i][path[-1] + 1]) != NONE and (
                nodes := [n for n, parent in enumerate(draft.parents[i]) if parent == path[-1] and tokens[n] == token]
            ):
                path.append(nodes[0])
            for processor in self._processors:
                processor.taken(i, [tokens[node] for node in path[1:]])

    def _node_scores(self, logits: Tensor, draft: Draft) -> Tensor:
        """`scores` of a tree, along the path to each of its leaves."""
        assert draft.parents is not None
        scores = logits.to(torch.float32, copy=True)
        leaves = [[node for node in range(len(parents)) if node not in parents] or [-1] for parents in draft.parents]
        for number in range(max(map(len, leaves))):
            ends = [parents[min(number, len(parents) - 1)] for parents in leaves]
            paths = [path_to(parents, end) for parents, end in zip(draft.parents, ends, strict=True)]
            path_scores = scores.new_zeros(len(paths), 1 + max(map(len, paths)), scores.shape[2])
            tokens = draft.tokens.new_zeros(path_scores.shape[:2])
            for row, path in enumerate(paths):
                path_scores[row, : 1 + len(path)] = logits[row, [0, *(1 + node for node in path)]]
                tokens[row, : len(path)] = draft.tokens[row, path]
            for processor in self._processors:
                processor.apply(path_scores, tokens, 0)
            for row, path in enumerate(paths):
                scores[row, [0, *(1 + node for node in path)]] = path_scores[row, : 1 + len(path)]
        return scores

    def _token_key(self, row: int, offset: int) -> int:
        """The key of the noise `offset` positions after a row's committed tokens."""
        return absorbed(self._token_seeds[row], len(self.rows[row].tokens) + offset)

    def draw(self, probs: Tensor, first: int = 0, stream: Stream = Stream.DRAFT) -> Tensor:
        """One token per position from probs [B, J, V], keyed by (seed, stream, absolute position) -> [B, J].

        In streams other than TOKEN the keys also depend on the round, because a position may be drafted again.
        """
        keys = self.race.bits(self._keys(stream, range(first, first + probs.shape[1])))
        return self.race.draw(probs.flatten(0, 1), keys.flatten()).view(probs.shape[:2])

    def leaders(self, scores: Tensor, first: int, count: int, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The tokens that lead the race for position `first`, and their shares of all speeds, both [B, count].

        The first one is the target's own token if the target's scores are these [B, V]. Greedy rows have no noise:
        their likeliest tokens lead, and the shares are probabilities. token_ids: [V] of the scores; None for 0, 1, ...
        """
        if self.all_greedy:
            return self.race.leaders(scores, self._temperatures, None, count, token_ids)
        for warp, rows in self._groups:
            if warp.options.removes_tokens:
                scores = scores.float()
                scores = scores.index_copy(0, rows, warp(scores[rows]).log_().mul_(warp.options.temperature))
        bits = self.race.bits(words([self._token_key(row, first) for row in range(len(self.rows))]))
        return self.race.leaders(scores, self._temperatures, bits, count, token_ids)

    def draw_at(self, distributions: Tensor, offsets: Tensor, width: int) -> Tensor:
        """One token per row from distributions [B, V] -> [B], `offsets[i]` positions after row i's committed tokens.

        offsets: [B], at most `width`, on the device; nothing waits for them.
        """
        keys = self.race.bits(self._keys(Stream.TOKEN, range(width + 1))).gather(1, offsets[:, None])[:, 0]
        return self.race.draw(distributions, keys).where(distributions.amax(-1) > 0, NONE)

    def round_keys(self, stream: Stream) -> list[int]:
        """One key per row for this round. stream: one other than TOKEN."""
        return [key(row.seed, stream, len(row.tokens), len(row.tokens)) for row in self.rows]

    def _distribution(self, warp: Warp, scores: Tensor) -> Tensor:
        # bias and the like, or a model's own NaN, can leave a position without any token; its distribution is then zero
        return warp(scores).nan_to_num_(0.0)

    def _blocks(self, positions: int) -> Iterator[tuple[Warp, slice | Tensor]]:
        """Rows of equal options, in blocks of the best size; a slice where the group is the whole batch."""
        size = HOST_BLOCK if self.device.type == "cpu" else DEVICE_BLOCK
        at_once = max(1, size // (positions * self.vocab_size))
        for warp, rows in self._groups:
            for start in range(0, len(rows), at_once):
                end = min(start + at_once, len(rows))
                yield warp, slice(start, end) if len(rows) == len(self.rows) else rows[start:end]

    def _keys(self, stream: Stream, offsets: range) -> Words:
        """[B, J] keys of the positions `offsets` after each row's committed tokens."""
        if stream not in self._seeds:
            seeds = absorb(np.zeros(1, dtype=np.uint64), words([row.seed for row in self.rows]))
            self._seeds[stream] = absorb(seeds, words([stream]))
        begin = words([len(row.tokens) for row in self.rows])[:, None]
        keys = absorb(self._seeds[stream][:, None], begin + words(offsets))
        return keys if stream is Stream.TOKEN else absorb(keys, begin)


def _greedy(scores: Tensor) -> Tensor:
    """The likeliest token at each position, [B, J]; NONE where none is possible: the best score is -inf only there."""
    best = argmax(scores)
    return best.masked_fill(torch.isneginf(scores.gather(-1, best[..., None])[..., 0]), NONE)


def _one_hot(scores: Tensor) -> Tensor:
    best, index = scores.max(-1, keepdim=True)
    return torch.zeros_like(scores).scatter_(-1, index, torch.isneginf(best).logical_not().to(scores.dtype))


def warp_options(params: SamplingParams) -> WarpOptions:
    """The options that shape a distribution."""
    return WarpOptions(*_WARPED(params))


def _groups(rows: Sequence[Row], device: torch.device) -> Iterator[tuple[Warp, Tensor]]:
    """The sampled rows, grouped by equal options: each group's warp and the indices of its rows."""
    groups: dict[WarpOptions, list[int]] = {}
    for i, row in enumerate(rows):
        p = params_of(row)
        if p.temperature:
            groups.setdefault(warp_options(p), []).append(i)
    for options, members in groups.items():
        yield Warp(options, device), torch.tensor(members, device=device)
