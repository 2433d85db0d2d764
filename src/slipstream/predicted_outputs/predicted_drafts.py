"""Drafts of rows with predictions: what a prediction proposes next, and whether it or the drafter drafts for a row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple
from weakref import WeakKeyDictionary

from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.loop import AskDrafter
from slipstream.core.rounds import PREDICTION
from slipstream.core.types import Draft, Row
from slipstream.draft_length.acceptance_model import AcceptanceModel
from slipstream.predicted_outputs.alignment import Alignment

# a token's kind is how many tokens before it agree: fewer than 2, 3, 4, ...; and each kind's acceptance probability
# before the row has shown anything
AGREED = (2, 3, 4, 6, 10, 16, 32)
BY_AGREED = (0.6, 0.7, 0.78, 0.84, 0.9, 0.94, 0.97, 0.985)
BY_GUESS = (0.7, 0.6, 0.5, 0.45)  # of the first token at a guessed place, by `Guess`
ROW_STEP = 0.5  # how far one token moves its row's weight
MIN_FIRST_PROB = 0.35  # a prediction whose next token is less likely leaves the row to the decoder's drafter
FIRST_CREDIT = 6.0  # how many tokens of a row's prediction may be rejected before it has earned anything
MAX_LOST = 8.0  # of the credit, in one round: one edit ends a draft of any length
GUESSED = 2  # tokens drafted at a guessed place, until proposals have earned anything
TRIAL = 4  # tokens of a trial of a prediction that has no credit
FLOOR = 0.2  # where costs do not decide, a prediction is cut below this acceptance probability


class Proposal(NamedTuple):
    """Tokens, and the probability that the first 1, 2, ... of them are all accepted."""

    tokens: list[int]
    acceptance_probs: list[float]


NOTHING = Proposal([], [])


@dataclass
class _Followed:
    """A row's prediction, followed as far as its output has come.

    num_read: tokens of the output that were read, in `rounds` rounds. proposed: what follows them; kinds: those of its
    tokens. guess: how the place of the first one was guessed, if it was. credit: how many more tokens may be rejected.
    earned: credit earned by all proposals so far.
    """

    alignment: Alignment
    num_read: int = 0
    proposed: Proposal = NOTHING
    kinds: tuple[int, ...] = ()
    guess: int | None = None
    rounds: int = 0
    credit: float = FIRST_CREDIT
    earned: float = 0.0

    @property
    def only_guesses(self) -> bool:
        """Whether the place is guessed and earlier proposals have earned nothing."""
        place = self.alignment.place
        return place is not None and place.guess is not None and self.earned <= 0

    @property
    def length(self) -> int:
        """How many of the proposed tokens to try, by what earlier proposals have earned."""
        place = self.alignment.place
        if place is None or not self.proposed.tokens or self.proposed.acceptance_probs[0] < MIN_FIRST_PROB:
            return 0
        if self.only_guesses:
            return min(GUESSED, int(self.credit))
        return max(int(self.credit), TRIAL if place.agreeing >= 12 else 0)  # the text follows the prediction again

    def settle(self, row: Row, new: list[int]) -> None:
        """Earn or lose credit by what became of the last proposal; one that was not verified earns half."""
        rounds = [round.without_forced for round in row.rounds[self.rounds :]]
        verified = sum(round.num_prediction_tokens or 0 for round in rounds)
        right = sum(min(round.num_prediction_tokens or 0, round.num_accepted_tokens) for round in rounds)
        earned = right - min(MAX_LOST, max(0, verified - right))
        if not verified:
            pairs = zip(self.proposed.tokens, new, strict=False)
            earned = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / 2
        self.earned, self.rounds = self.earned + earned, len(row.rounds)
        self.credit = max(0.0, min(64.0, self.credit + earned + len(new) / 128))  # each token of the text regains a bit


class RowPredictions:
    """Follows the predictions of rows, each on its own: what a row's prediction proposes depends on that row alone.

    ends_line: whether a token ends a line. Every proposal is compared with what the text became, verified or not.
    """

    def __init__(self, ends_line: Callable[[int], bool]) -> None:
        self._ends_line = ends_line
        self._followed: WeakKeyDictionary[Row, _Followed] = WeakKeyDictionary()
        self._matched = AcceptanceModel(BY_AGREED, shared=False, row_step=ROW_STEP)
        self._guessed = AcceptanceModel(BY_GUESS, shared=False, row_step=ROW_STEP)

    def proposal(self, row: Row) -> Proposal:
        """The next tokens of a row's prediction; none without a prediction, or where it is unlikely to be right."""
        if not row.prediction:
            return NOTHING
        followed = self._followed.get(row)
        if followed is None:
            followed = self._followed[row] = _Followed(Alignment(row.prediction, self._ends_line))
            self._propose(row, followed)
        if followed.num_read < row.num_output_tokens:
            self._read(row, followed)
            self._propose(row, followed)
        length, proposed = followed.length, followed.proposed
        return Proposal(proposed.tokens[:length], proposed.acceptance_probs[:length]) if length else NOTHING

    def only_guesses(self, row: Row) -> bool:
        """Whether a row's prediction only guesses its place, so that the drafter's draft goes first."""
        return row in self._followed and self._followed[row].only_guesses

    def _read(self, row: Row, followed: _Followed) -> None:
        """Read the new tokens, and learn from them how good the last proposal was."""
        new = row.tokens[row.prompt_length + followed.num_read :]
        tokens, kinds = followed.proposed.tokens, followed.kinds
        followed.settle(row, new)
        if followed.guess is not None:
            self._guessed.learn(row, [followed.guess], tokens, new)
        if followed.guess is None or tokens[:1] == new[:1]:
            skip = followed.guess is not None
            self._matched.learn(row, kinds[skip:], tokens[skip:], new[skip:])
        followed.alignment.read(new)
        followed.num_read += len(new)

    def _propose(self, row: Row, followed: _Followed) -> None:
        place = followed.alignment.place
        followed.proposed, followed.kinds, followed.guess = NOTHING, (), None
        if place is None:
            return
        tokens, probs, kinds, path = list[int](), list[float](), list[int](), 1.0
        length = min(MAX_DRAFT_TOKENS, max(int(followed.credit), TRIAL))
        expected = followed.alignment.prediction[place.start : place.start + length]
        for offset, token in enumerate(expected):
            kind = bisect_right(AGREED, place.agreeing + offset)
            guessed = place.guess is not None and not offset
            path *= self._guessed.chance(row, place.guess or 0) if guessed else self._matched.chance(row, kind)
            if path < 0.01:
                break
            tokens.append(token)
            probs.append(path)
            kinds.append(kind)
        followed.proposed, followed.kinds = Proposal(tokens, probs), tuple(kinds)
        followed.guess = None if place.guess is None or not tokens else int(place.guess)


@dataclass
class PredictedDrafts:
    """Asks each row's prediction first, and the drafter for the remaining rows; see `core.loop.Predict`.

    A prediction proposes a one-hot chain with acceptance probabilities. If every row's prediction proposes something,
    the round costs no forward of a draft model. A prediction that only guesses its place gives way to a drafter that
    may draft more tokens, so that a wrong prediction replaces no draft.
    longest: most tokens of a prediction in a round. free_drafts: the drafter takes no forwards; then it is asked for
    every row, and the draft with more expected accepted tokens is taken. costs_decide: whether the policy cuts a row's
    draft to what pays.
    """

    predictions: RowPredictions
    longest: int = MAX_DRAFT_TOKENS
    free_drafts: bool = False
    costs_decide: Callable[[Row], bool] = lambda row: False

    def __call__(
        self, rows: Sequence[Row], lengths: Sequence[int], room: Sequence[int], ask_drafter: AskDrafter
    ) -> Draft:
        """One draft per row, from its prediction or from the drafter.

        lengths: the most tokens of the drafter's draft; room: of the prediction's.
        """
        proposals = [self._proposal(row, n) for row, n in zip(rows, room, strict=True)]
        if not any(proposal.tokens for proposal in proposals):
            return ask_drafter(lengths)
        goes_first = [
            bool(proposal.tokens) and (n <= len(proposal.tokens) or not self.predictions.only_guesses(row))
            for row, proposal, n in zip(rows, proposals, lengths, strict=True)
        ]
        drafted = ask_drafter(
            [0 if is_first and not self.free_drafts else n for is_first, n in zip(goes_first, lengths, strict=True)]
        )
        expected = [sum(probs or ()) for probs in drafted.acceptance_probs]
        is_predicted = [
            bool(proposal.tokens) and (not n or (is_first and sum(proposal.acceptance_probs) >= accepted))
            for proposal, is_first, n, accepted in zip(proposals, goes_first, drafted.lengths, expected, strict=True)
        ]
        predicted = Draft.from_lists(
            [proposal.tokens for proposal in proposals],
            drafted.tokens.device,
            [proposal.acceptance_probs for proposal in proposals],
            PREDICTION,
        )
        predicted = predicted.cut([n * is_taken for n, is_taken in zip(predicted.lengths, is_predicted, strict=True)])
        return Draft.where(is_predicted, predicted, drafted)

    def _proposal(self, row: Row, room: int) -> Proposal:
        proposal, length = self.predictions.proposal(row) if room else NOTHING, min(room, self.longest)
        if not self.costs_decide(row) or row.params.num_draft_tokens is not None:
            length = min(length, sum(prob >= FLOOR for prob in proposal.acceptance_probs))
        return Proposal(proposal.tokens[:length], proposal.acceptance_probs[:length])
