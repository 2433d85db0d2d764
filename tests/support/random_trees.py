"""Draft trees of any form, partly right: any parents, duplicates, nodes in any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from slipstream import Draft
from slipstream.core.types import Row
from slipstream.sampling.sampler import Sampler

RIGHT, DEEPER = 0.6, 0.5  # chances that a node continues a right path rightly, and that it follows the previous node


@dataclass
class RandomTrees:
    """Proposes trees in which a random beginning of the row's continuation is a path.

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
        """The number of trees whose accepted tokens had to be moved to their positions."""
        rounds = [round for row in self.rows for round in row.rounds if round.path is not None]
        return sum(len(round.path or ()) > round.num_accepted_on_chain for round in rounds)

    def _tree(self, row: Row, length: int) -> tuple[list[int], list[int]]:
        continuation = self.texts[tuple(row.tokens[: row.prompt_length])][row.num_output_tokens :]
        tokens, parents, right = list[int](), list[int](), [0]  # right: depth up to which a node's path is right, or -1
        for node in range(length):
            parent = node - 1 if self._random.random() < DEEPER else self._random.randrange(-1, node)
            depth, token = right[parent + 1], self._random.randrange(self.vocab_size)
            if 0 <= depth < len(continuation) and self._random.random() < RIGHT:
                token = continuation[depth]
            tokens.append(token)
            parents.append(parent)
            right.append(depth + 1 if 0 <= depth < len(continuation) and token == continuation[depth] else -1)
        if self.ordered:
            return tokens, parents
        places = self._random.sample(range(length), length)
        number = {node: i for i, node in enumerate(places)} | {-1: -1}
        return [tokens[node] for node in places], [number[parents[node]] for node in places]
