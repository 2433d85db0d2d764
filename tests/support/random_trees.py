"""Draft trees of any form, right in places: any parents, duplicates, nodes in any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from slipstream import Draft
from slipstream.core.types import Row
from slipstream.sampling.sampler import Sampler

RIGHT, DEEPER = 0.6, 0.5  # chances that a node says what the text says, if it can, and that it follows the last one


@dataclass
class RandomTrees:
    """Proposes trees in which the text that a row will have is a path as far as chance has it.

    texts: prompt -> its text. ordered: parents before their children.
    """

    texts: Mapping[tuple[int, ...], Sequence[int]]
    vocab_size: int
    seed: int = 0
    ordered: bool = False
    rows: set[Row] = field(default_factory=set)
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        self.rows.update(rows)
        trees = [self._tree(row, length) for row, length in zip(rows, lengths, strict=True)]
        draft = Draft.from_lists([tokens for tokens, _ in trees], sampler.device)
        parents = tuple(tuple(parents) for _, parents in trees)
        return Draft(draft.tokens, draft.lengths, parents=parents)

    @property
    def verified(self) -> int:
        """How many trees were verified, and accepted tokens moved to their positions after."""
        rounds = [done for row in self.rows for done in row.rounds if done.path is not None]
        return sum(len(done.path or ()) > done.num_accepted_on_chain for done in rounds)

    def _tree(self, row: Row, length: int) -> tuple[list[int], list[int]]:
        rest = self.texts[tuple(row.tokens[: row.prompt_length])][row.num_output_tokens :]
        tokens, parents, right = list[int](), list[int](), [0]  # right: depth up to which a path is right, or -1
        for node in range(length):
            parent = node - 1 if self._random.random() < DEEPER else self._random.randrange(-1, node)
            depth, token = right[parent + 1], self._random.randrange(self.vocab_size)
            if 0 <= depth < len(rest) and self._random.random() < RIGHT:
                token = rest[depth]
            tokens.append(token)
            parents.append(parent)
            right.append(depth + 1 if 0 <= depth < len(rest) and token == rest[depth] else -1)
        if self.ordered:
            return tokens, parents
        places = self._random.sample(range(length), length)
        number = {node: at for at, node in enumerate(places)} | {-1: -1}
        return [tokens[node] for node in places], [number[parents[node]] for node in places]
