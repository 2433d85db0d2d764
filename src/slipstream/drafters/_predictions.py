"""Predicted outputs: drafts what follows the place that an output has reached in its request's prediction.

While both agree, the place moves on with every token. After an edit it is where the longest end of the output occurs in
the prediction; if it occurs several times, the next one after the edit. A single token is enough only shortly after the
edit. This module knows no model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from slipstream.core.interfaces import Sampler
from slipstream.core.rounds import PREDICTION
from slipstream.core.types import Draft, Row
from slipstream.draft_length.acceptance_model import AcceptanceModel
from slipstream.drafters._tree_growth import UNLIKELY, Node, learn

UNLIKELY_WITHOUT_COSTS = 0.3  # where costs do not cut a draft, it ends before a token that is less likely
NEAR = 16  # tokens after an edit among which a single one is enough to continue there
# a token's kind is how many tokens before it agree: fewer than 2, 3, 4, ...; and each kind's acceptance probability
# before the row has shown anything
AGREED = (2, 3, 4, 6, 10, 16, 32)
BY_AGREED = (0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.97, 0.985)
BEGINNING = 2  # at the beginning of a prediction, this many tokens are taken to agree
ROW_STEP = 0.5  # how far one token moves its row's weight


class Place:
    """The place in a row's prediction at which its output is expected to continue."""

    def __init__(self, row: Row) -> None:
        self.prediction, self.num_read = row.prediction, row.prompt_length
        self.index = 0  # of the next token in the prediction
        self.edited = 0  # the index before which two tokens agreed last
        self.agreeing = {0: BEGINNING}  # how many tokens agree before each index that may be next
        self.nodes: list[Node] = []  # the tokens expected after those read
        self._after = defaultdict[int, list[int]](list)  # the index after each occurrence of a token
        for index, token in enumerate(self.prediction, 1):
            self._after[token].append(index)

    def read(self, tokens: Sequence[int]) -> None:
        """Follow the row's tokens through the prediction."""
        for token in tokens[self.num_read :]:
            before = self.agreeing
            self.agreeing = {index: before.get(index - 1, 0) + 1 for index in self._after.get(token, ())}
            self.index += 1
            if self.index not in self.agreeing:
                self.index = max(self.agreeing, key=self._rank, default=0)
            if self.agreeing.get(self.index, 0) >= 2:
                self.edited = self.index
            elif not 0 < self.index - self.edited <= NEAR:
                self.index = len(self.prediction)  # nothing is expected
        self.num_read = len(tokens)

    def _rank(self, index: int) -> tuple[int, bool, int]:
        return self.agreeing[index], index > self.edited, -abs(index - self.edited)


@dataclass
class PredictionDrafter:
    """Drafts from the predictions of rows, with acceptance probabilities; a row's depend on that row alone.

    costs_decide: the policy cuts drafts to what pays.
    """

    costs_decide: bool = False
    _places: WeakKeyDictionary[Row, Place] = field(default_factory=WeakKeyDictionary, repr=False)

    def __post_init__(self) -> None:
        self._least = UNLIKELY if self.costs_decide else UNLIKELY_WITHOUT_COSTS
        self._acceptance_model = AcceptanceModel(BY_AGREED, shared=False, row_step=ROW_STEP)

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        drafts = [self._draft(row, n) if row.prediction else [] for row, n in zip(rows, lengths, strict=True)]
        probs = [[node.prob for node in nodes] for nodes in drafts]
        return Draft.from_lists([[node.token for node in nodes] for nodes in drafts], sampler.device, probs, PREDICTION)

    def _draft(self, row: Row, length: int) -> list[Node]:
        place = self._places.get(row)
        if place is None:
            place = self._places[row] = Place(row)
        learn(self._acceptance_model, row, place.num_read, place.nodes)
        place.read(row.tokens)
        nodes, prob, chance = list[Node](), 1.0, self._acceptance_model.chances(row)
        agreeing = place.agreeing.get(place.index, 0)
        for offset, token in enumerate(place.prediction[place.index : place.index + length]):
            kind = bisect_right(AGREED, agreeing + offset)
            prob *= chance(kind)
            nodes.append(Node(offset - 1, token, kind, prob))
            if prob < self._least:  # learned from, so that a row's later drafts may be likelier
                break
        place.nodes = nodes
        return [node for node in nodes if node.prob >= self._least]
