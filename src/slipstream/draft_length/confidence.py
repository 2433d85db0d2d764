"""How likely a draft model's tokens are accepted, by how sure it is of them itself.

That is its own probability of a token, or, where the target samples with random numbers that the draft model shares,
the token's share of all speeds in that race, which also says how far ahead the token is (benchmarks/race_shares.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.types import Row
from slipstream.draft_length.acceptance_model import AcceptanceModel
from slipstream.draft_length.draft_yields import DraftNote

BINS = 20  # of how sure the draft model is of a token, from 0 to 1


class Confidence:
    """Learns, bin by bin of how sure the draft model is, how often its tokens are accepted.

    And, where its own token is not, how often the one beside it is, by the share of that among all others.
    """

    def __init__(self) -> None:
        prior = [(i + 0.5) / BINS for i in range(BINS)]
        self._own, self._beside = AcceptanceModel(prior), AcceptanceModel(prior)

    def learn(self, row: Row, note: DraftNote) -> None:
        """Take in the row's newest round."""
        done = row.rounds[-1].own
        self._own.learn(row, note.kinds, done.chain, done.tokens)
        at = done.num_in_place
        if at < min(len(done.chain), len(done.tokens), len(note.siblings)):
            token, kind = note.siblings[at]
            self._beside.learn(row, [kind], [token], done.tokens[at:])

    def acceptance_probs(self, row: Row, chances: Sequence[float]) -> list[float]:
        """The probability that the first 1, 2, ... tokens are all accepted. chances: how sure it is of each."""
        path, probs = 1.0, []
        for chance in chances:
            path *= self._own.chance(row, bin_of(chance))
            probs.append(path)
        return probs

    def sibling_probs(self, row: Row, chances: Sequence[float], beside: Sequence[float]) -> list[float]:
        """The probability that the text follows the draft up to each token and has the one beside it instead.

        beside: how sure the draft model is of each of these.
        """
        path, probs = 1.0, []
        for chance, other in zip(chances, beside, strict=True):
            own = self._own.chance(row, bin_of(chance))
            probs.append(path * (1 - own) * self._beside.chance(row, sibling_bin(chance, other)))
            path *= own
        return probs


def bin_of(chance: float) -> int:
    """The kind of a token by how sure the draft model is of it."""
    return min(BINS - 1, int(chance * BINS))


def sibling_bin(chance: float, other: float) -> int:
    """The kind of a token beside a draft's own: by how sure the draft model is of it if its own is wrong."""
    return bin_of(other / max(1e-6, 1 - chance))
