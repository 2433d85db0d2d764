"""After any history, a session scores as one that has never seen anything.

The backend of most tests hashes the whole prefix it reads from its cache, so one wrong position changes every logit.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import SlipstreamError
from slipstream.core.interfaces import Backend
from slipstream.core.kv_slots import CATCH_UP, EXACT_FIT, PROMPT_UNIT, Shapes
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.models.backend_capabilities import RowSegment
from slipstream.models.hf.backend import HFBackend
from slipstream.models.layouts import make_session
from slipstream.models.toy import ToyBackend
from tests.support.session_cases import CAPACITY, commit, from_scratch, new_row, table
from tests.support.tiny_models import HashBackend, RaggedHash, fresh, prompts

pytestmark = pytest.mark.usefixtures("cache_audit")

AGREEING = Shapes((4, 8, 16, 32, 64, 128, 256), 256, 512)
RAGGED = replace(AGREEING, totals=(8, 12, 16, 24))
SHAPES = [EXACT_FIT, AGREEING, Shapes((), 3), Shapes((4, 8, 16), 4)]


class BatchProcessor:
    """Rows that are edited at random; every score is compared with one from scratch."""

    def __init__(self, make: Callable[[], Backend], shapes: Shapes, seed: int, tolerance: float = 0.0) -> None:
        self.make, self.tolerance, self.rng = make, tolerance, random.Random(seed)
        self.backend = make()
        self.vocab = self.backend.vocab_size
        self.session = make_session(self.backend, shapes)
        self.session.reserve(3 + seed % 3, CAPACITY)  # sometimes more slots than rows
        self.rows = [self.enter()]
        self.scored = 0

    def token(self) -> int:
        return self.rng.randrange(min(self.vocab, 3))  # few distinct tokens, so that beginnings are often shared

    def enter(self) -> Row:
        return new_row([self.token() for _ in range(self.rng.choice((1, 2, 4, 9, 15)))])

    def drafts(self) -> list[list[int]]:
        return [[self.token() for _ in range(self.rng.choice((0, 1, 2, 3, 5)))] for _ in self.rows]

    def score(self, drafts: Sequence[Sequence[int]]) -> None:
        logits = self.session.score(self.rows, *table(drafts))
        for i, (row, draft) in enumerate(zip(self.rows, drafts, strict=True)):
            want = from_scratch(self.make, row, draft)
            torch.testing.assert_close(logits[i, : len(draft) + 1], want, rtol=0, atol=self.tolerance)
            self.scored += 1

    def round(self) -> None:
        drafts = self.drafts()
        self.score(drafts)
        for row, draft in zip(self.rows, drafts, strict=True):
            commit(row, draft, self.rng.randint(0, len(draft)), self.token())

    def column_by_column(self) -> None:
        """Scores as a draft model does: one position at a time, after the draft so far; the last token is never fed."""
        width = self.rng.randint(1, 4)
        drafts = [[self.token() for _ in range(width)] for _ in self.rows]
        for j in range(width):
            logits = self.session.score(self.rows, *table([draft[:j] for draft in drafts]), keep=1)
            for i, (row, draft) in enumerate(zip(self.rows, drafts, strict=True)):
                want = from_scratch(self.make, row, draft[:j])[-1]
                torch.testing.assert_close(logits[i, 0], want, rtol=0, atol=self.tolerance)
                self.scored += 1
        for row, draft in zip(self.rows, drafts, strict=True):
            accepted_draft = draft[: self.rng.randint(0, width)]
            commit(row, accepted_draft, self.rng.randint(0, len(accepted_draft)), self.token())

    def interrupted(self) -> None:
        """A round that is scored and never committed; new rows with the same tokens take over."""
        self.score(self.drafts())
        self.rows = [new_row(row.tokens) for row in self.rows]

    def failed_forward(self) -> None:
        """The model stops in the middle of a forward, its cache half written."""
        forward = self.backend.forward

        def half(tokens: torch.Tensor, starts: list[int], *, first_slot: int, logits: bool) -> torch.Tensor:
            forward(tokens[:1, :1], starts[:1], first_slot=first_slot, logits=logits)
            raise KeyboardInterrupt

        def half_ragged(tokens: torch.Tensor, segments: Sequence[RowSegment], **options: Any) -> torch.Tensor:
            return half(tokens[None], [segments[0].start], first_slot=segments[0].slot, logits=False)

        forward_ragged = getattr(self.backend, "forward_ragged", None)
        self.backend.forward = half
        if forward_ragged is not None:
            self.backend.forward_ragged = half_ragged
        try:
            with pytest.raises(KeyboardInterrupt):
                self.session.score(self.rows, *table(self.drafts()))
        finally:
            self.backend.forward = forward
            if forward_ragged is not None:
                self.backend.forward_ragged = forward_ragged

    def far_ahead(self) -> None:
        """A row gains more than a session feeds at once, as when a draft model sat out some rounds."""
        for _ in range(CATCH_UP + 2):
            commit(self.rows[0], [], 0, self.token())

    def join(self) -> None:
        if len(self.rows) < 3:
            self.rows.append(self.enter())

    def replace(self) -> None:
        place = self.rng.randrange(len(self.rows))
        shared = self.rng.choice(self.rows).tokens[: self.rng.randint(1, 12)]
        self.rows[place].finish_reason = "stop"
        self.rows[place] = new_row([*shared, self.token()])

    def leave(self) -> None:
        """The last row takes the place of one that leaves."""
        if len(self.rows) > 1:
            place = self.rng.randrange(len(self.rows) - 1)
            self.rows[place].finish_reason = "stop"
            self.rows[place] = self.rows.pop()

    def regrow(self) -> None:
        self.session.reserve(3, CAPACITY + 10 * self.rng.randint(0, 9))


EDITS = [
    "round",
    "column_by_column",
    "interrupted",
    "failed_forward",
    "far_ahead",
    "join",
    "replace",
    "leave",
    "regrow",
]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(EDITS), min_size=1, max_size=14), st.sampled_from(SHAPES), st.integers(0, 1 << 20))
def test_score_after_any_history_equals_score_from_scratch(edits: list[str], shapes: Shapes, seed: int) -> None:
    history = BatchProcessor(HashBackend, shapes, seed)
    for edit in edits:
        getattr(history, edit)()
    history.round()
    assert history.scored > 0


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(EDITS), min_size=1, max_size=14),
    st.sampled_from([EXACT_FIT, RAGGED, AGREEING, Shapes((), 3)]),
    st.integers(0, 1 << 20),
)
def test_ragged_forwards_score_as_a_fresh_session_whatever_came_before(
    edits: list[str], shapes: Shapes, seed: int
) -> None:
    history = BatchProcessor(RaggedHash, shapes, seed)
    for edit in ["join", "join", "round", *edits]:
        getattr(history, edit)()
    history.round()
    assert isinstance(history.backend, RaggedHash)
    assert shapes == AGREEING or history.backend.together


@settings(max_examples=10)
@given(st.lists(st.sampled_from(EDITS), min_size=1, max_size=8), st.integers(0, 1 << 20))
def test_the_toy_model_scores_as_a_fresh_session_whatever_came_before(edits: list[str], seed: int) -> None:
    history = BatchProcessor(ToyBackend, EXACT_FIT, seed)
    for edit in edits:
        getattr(history, edit)()
    history.round()


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("shapes", [EXACT_FIT, AGREEING, Shapes((), 5)], ids=["exact", "agreeing", "chunks"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mistral"])
@torch.inference_mode()
def test_transformers_score_as_a_fresh_session_whatever_came_before(name: str, shapes: Shapes) -> None:
    model = fresh(name)
    if name == "gpt2":
        model = fresh(name, n_positions=CAPACITY)
    history = BatchProcessor(lambda: HFBackend(model), shapes, seed=3, tolerance=2e-5)
    for edit in ["round", "join", "round", "column_by_column", "replace", "failed_forward", "join", "round", "leave"]:
        getattr(history, edit)()
        history.round()


@pytest.mark.parametrize("width", [1, 4])
def test_a_row_may_draft_other_tokens_after_a_failed_round(width: int) -> None:
    session = Session(HashBackend())
    session.reserve(1, CAPACITY)
    row = new_row([1, 2, 3])
    session.score([row], torch.tensor([[4, 5]]), [2])  # never committed
    draft = [6, 0, 1, 2][:width]
    again = session.score([row], torch.tensor([draft]), [width])
    assert again.shape[1] == width + 1
    torch.testing.assert_close(again[0], from_scratch(HashBackend, row, draft), rtol=0, atol=0)


def test_only_tokens_that_are_not_cached_are_fed() -> None:
    backend = HashBackend()
    session = Session(backend)
    session.reserve(1, CAPACITY)
    row = new_row(range(6))
    session.score([row], torch.tensor([[1, 2, 3]]), [3])
    assert backend.forwards == [(1, 5, False), (1, 4, True)]  # the prompt but its last token; that one and the draft
    commit(row, [1, 2, 3], 2, 5)
    session.score([row], torch.tensor([[4]]), [1])
    assert backend.forwards[2:] == [(1, 2, True)]  # the recovered token and the draft: two were accepted in place
    commit(row, [4], 1, 0)
    session.score([row], torch.empty(1, 0, dtype=torch.int64), [0])
    assert backend.forwards[3:] == [(1, 1, True)]


def test_a_prompt_that_begins_like_an_earlier_one_is_not_read_again() -> None:
    session = Session(HashBackend())
    session.reserve(2, CAPACITY)
    common = [token % 7 for token in range(50)]
    session.prefill([new_row([*common, 1, 2])])
    assert session.prefill_tokens == 51
    rows = [new_row([*common, 3, 4]), new_row([*common, 5])]
    logits = session.score(rows, *table([[], []]))
    assert session.prefill_tokens == 51
    for row, got in zip(rows, logits, strict=True):
        torch.testing.assert_close(got, from_scratch(HashBackend, row, []), rtol=0, atol=0)


def test_forwards_keep_to_the_agreed_widths() -> None:
    history = BatchProcessor(HashBackend, AGREEING, seed=5)
    backend = history.session.backend
    for edit in ["round", "join", "round", "replace", "join", "round", "leave", "far_ahead", "round"]:
        getattr(history, edit)()
    history.score([[] for _ in history.rows])  # as plain decoding: one new token per row
    scored, read = ({width for _, width, logits in backend.forwards if logits is wanted} for wanted in (True, False))
    assert scored and scored <= set(AGREEING.widths)
    # prompts need no agreement, only few widths that depend on their own length alone
    assert read and read <= set(range(PROMPT_UNIT, AGREEING.chunk + 1, PROMPT_UNIT))


def _claims_one_too_many(session: Session, rows: list[Row]) -> None:
    session.slot_states[0].base += 1


def _believes_rejected_tokens(session: Session, rows: list[Row]) -> None:
    session.slot_states[0].base = session.slot_states[0].written


def _holds_another_row(session: Session, rows: list[Row]) -> None:
    session.slot_states[0], session.slot_states[1] = session.slot_states[1], session.slot_states[0]


CORRUPTIONS = [_claims_one_too_many, _believes_rejected_tokens, _holds_another_row]


def _two_rows(session: Session) -> list[Row]:
    session.reserve(2, CAPACITY)
    rows = [new_row([1, 2, 3, 4]), new_row([5, 6, 0, 1], 1)]
    session.score(rows, *table([[1, 2, 3], [4, 5]]))
    commit(rows[0], [1, 2, 3], 0, 6)
    commit(rows[1], [4, 5], 1, 0)
    for row in rows:  # a round that the session did not score
        commit(row, [], 0, 5)
    return rows


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
def test_the_cache_audit_catches_corrupted_cached_tokens(corrupt: Callable[[Session, list[Row]], None]) -> None:
    session = Session(HashBackend())
    rows = _two_rows(session)
    corrupt(session, rows)
    with pytest.raises(SlipstreamError, match="KV cache: slot"):
        session.score(rows, *table([[2], [3]]))


@pytest.mark.parametrize("corrupt", [None, *CORRUPTIONS])
def test_without_the_cache_audit_corrupted_cached_tokens_change_the_logits(
    corrupt: Callable[[Session, list[Row]], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLIPSTREAM_DEBUG")
    session = Session(HashBackend())
    rows = _two_rows(session)
    if corrupt is not None:
        corrupt(session, rows)
    logits = session.score(rows, *table([[2], [3]]))
    want = torch.stack([from_scratch(HashBackend, rows[0], [2]), from_scratch(HashBackend, rows[1], [3])])
    assert torch.equal(logits, want) == (corrupt is None)


def test_an_interrupted_copy_leaves_no_wrong_cached_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = HashBackend()
    session = Session(backend)
    session.reserve(2, CAPACITY)
    first, second = (new_row([i, *tokens]) for i, tokens in enumerate(prompts([9, 9], vocab=7)))
    session.prefill([first, second])
    copy = backend.copy

    def interrupted(source: int, destination: int, length: int) -> None:
        copy(source, destination, length)
        raise KeyboardInterrupt

    monkeypatch.setattr(backend, "copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.prefill([second])  # the second row moves to the first slot
    monkeypatch.undo()
    monkeypatch.setenv("SLIPSTREAM_DEBUG", "1")
    logits = session.score([first], torch.tensor([[1]]), [1])
    torch.testing.assert_close(logits[0], from_scratch(HashBackend, first, [1]), rtol=0, atol=0)


@pytest.mark.parametrize("forgets", [True, False])
def test_another_draft_after_an_interrupted_round_needs_the_round_forgotten(forgets: bool) -> None:
    session, row = Session(HashBackend()), new_row([1, 2, 3])
    session.reserve(1, CAPACITY)
    for drafts in ([[5]], [[5, 6]]):  # token by token, as a draft model scores its own draft
        session.score([row], *table(drafts), keep=1)
    if forgets:
        session.forget_round()
    other = [7, 8, 9]
    logits = session.score([row], *table([other]), keep=1)[0]
    assert torch.equal(logits, from_scratch(HashBackend, row, other)[-1:]) == forgets
