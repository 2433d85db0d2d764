"""A draft model's cache over rows of another vocabulary: it scores as if every text were read from scratch."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from slipstream import SamplingParams, SlipstreamError
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.drafters.cross_vocabulary.bridged_session import BridgedSession
from slipstream.models.layouts import make_session
from slipstream.models.toy import ToyTokenizer
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from slipstream.tokenization.vocabulary import VocabularyInfo
from slipstream.tokenization.vocabulary_bridge import VocabularyBridge, bridge_between
from tests.support.tiny_models import HashBackend, RaggedHash
from tests.support.vocabularies import TEXT, bridge

DATA = list("\n".join(TEXT).encode())
PARAMS = SamplingParams(max_tokens=500)
GREEDY = SamplingParams(max_tokens=9)


def recutting() -> VocabularyBridge:
    """A draft model that reads `abc` as one token but `abcd` as `a` and `bcd`."""
    letters = [chr(code) for code in range(32, 127)]
    merges = [("c", "d"), ("b", "cd"), ("a", "b"), ("ab", "c")]
    vocabulary = {token: i for i, token in enumerate([*letters, "cd", "bcd", "ab", "abc"])}
    hf_tokenizer = HFTokenizer(
        transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, merges, unk_token="~")))
    )
    target = bridge("toy", "bytes").target
    draft = VocabularyInfo("recutting", len(vocabulary), (), hf_tokenizer)
    return bridge_between(VocabularyInfo("toy", 257, (256,), ToyTokenizer()), target.head_size, draft, draft.head_size)


def scored(bridged: BridgedSession, rows: list[Row], drafted: list[list[int]]) -> torch.Tensor:
    """Logits after the rows' texts and drafts, fed token by token as a drafter does."""
    draft_rows, logits = bridged.draft_rows(rows, 8), torch.empty(0)
    for width in range(len(drafted[0]) + 1):
        bridged.note_drafted(rows, [line[:width] for line in drafted])
        draft_tokens = torch.tensor([line[:width] for line in drafted], dtype=torch.int64).reshape(len(rows), width)
        logits = bridged.session.score(draft_rows, draft_tokens, [width] * len(rows), keep=1)
    return logits


def fresh(pair: VocabularyBridge, ragged: bool = False) -> BridgedSession:
    backend = (RaggedHash if ragged else HashBackend)(pair.draft.head_size)
    return BridgedSession(make_session(backend), pair)


@pytest.mark.slow
@pytest.mark.usefixtures("cache_audit")
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.parametrize("ragged", [False, True], ids=["padded", "ragged"])
def test_scoring_after_any_rounds_equals_scoring_from_scratch(ragged: bool, data: st.DataObject) -> None:
    pair = bridge("toy", "bytes")
    bridged = fresh(pair, ragged)
    rows = [Row(i, DATA[start : start + 20], PARAMS, i) for i, start in enumerate((0, 90, 300))]
    running = list(rows)
    for _ in range(data.draw(st.integers(2, 5), label="rounds")):
        if len(running) > 1 and data.draw(st.booleans(), label="one leaves"):
            del running[data.draw(st.integers(0, len(running) - 1), label="which")]  # later rows move up a slot
        width = data.draw(st.integers(0, 3), label="width")
        guess = st.lists(st.integers(0, pair.draft.head_size - 1), min_size=width, max_size=width)
        continuations = [
            pair.draft.encode(bytes(DATA[len(r.tokens) : len(r.tokens) + 30]).decode(errors="ignore")) for r in running
        ]
        drafted = [
            continuation.ids[:width]
            if data.draw(st.booleans()) and len(continuation.ids) >= width
            else data.draw(guess)
            for continuation in continuations
        ]
        logits = scored(bridged, running, drafted)
        alone = [
            scored(fresh(pair, ragged), [Row(0, row.tokens, PARAMS, 0)], [d])
            for row, d in zip(running, drafted, strict=True)
        ]
        assert torch.equal(logits, torch.cat(alone))
        for row in running:
            row.tokens += DATA[len(row.tokens) : len(row.tokens) + data.draw(st.integers(1, 6), label="committed")]


@pytest.mark.usefixtures("cache_audit")
@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_tokens_that_change_when_the_text_grows_are_read_again(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = recutting()
    bridged, row = fresh(pair), Row(0, list(b"x abc"), GREEDY, 0)
    assert [pair.draft.texts[token] for token in bridged.draft_rows([row], 1)[0].tokens] == [b"x", b" ", b"abc"]
    scored(bridged, [row], [[]])
    row.tokens.append(ord("d"))
    if right:
        again = scored(bridged, [row], [[]])
        assert torch.equal(again, scored(fresh(pair), [Row(0, list(b"x abcd"), GREEDY, 0)], [[]]))
    else:
        monkeypatch.setattr(Session, "keep", lambda self, row, length: None)
        with pytest.raises(SlipstreamError, match=r"slot 0 position 2 holds token .*, committed is"):
            scored(bridged, [row], [[]])


class Settling(HashBackend):
    """Cannot go back behind a position marked as final, as recurrent layers cannot; it then reads the text again."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.kept = [0] * 8
        self.fed = 0

    def mark_final(self, slot: int, position: int) -> None:
        self.kept[slot] = max(self.kept[slot], position)

    def checkpoint(self, slot: int, limit: int) -> int:
        return limit if limit >= self.kept[slot] else 0

    def forward(self, tokens: torch.Tensor, starts: list[int], *, first_slot: int, logits: bool) -> torch.Tensor:
        self.fed += tokens.numel()
        for slot, start in enumerate(starts, first_slot):
            if start < self.kept[slot]:
                self.kept[slot] = 0
        return super().forward(tokens, starts, first_slot=first_slot, logits=logits)


@pytest.mark.parametrize("is_marked", [True, False], ids=["marked", "not marked"])
def test_a_recurrent_draft_model_keeps_a_checkpoint_before_the_tokens_that_may_change(
    is_marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = bridge("toy", "bytes")
    backend = Settling(pair.draft.head_size)
    bridged, row = BridgedSession(make_session(backend), pair), Row(0, DATA[:400], PARAMS, 0)
    if not is_marked:
        monkeypatch.setattr(Row, "open_end", property(lambda self: 1, lambda self, value: None), raising=False)
    for count in range(400, 430):
        row.tokens[:] = DATA[:count]
        scored(bridged, [row], [[]])
    length = len(bridged.draft_rows([row], 1)[0].tokens)
    assert (backend.fed < 2 * length) is is_marked


def test_a_prompt_that_was_read_ahead_is_not_read_again() -> None:
    pair = bridge("toy", "bytes")
    bridged, row = fresh(pair), Row(0, DATA[:200], PARAMS, 0)
    bridged.reserve(2, 300)
    assert not bridged.holds(row) and not bridged.has_read(row)
    bridged.read_ahead({1: row}, 1000)
    assert bridged.holds(row) and bridged.has_read(row)
    forwards = len(bridged.backend.forwards)  # type: ignore[attr-defined]
    scored(bridged, [Row(1, DATA[:50], PARAMS, 1), row], [[], []])
    read = [width for _, width, _ in bridged.backend.forwards[forwards:]]  # type: ignore[attr-defined]
    assert sum(read) < 60  # the other row's text, and only the ends of both


def test_a_text_without_a_token_of_the_draft_model_can_be_scored() -> None:
    bridged = fresh(bridge("toy", "bytes"))
    row = Row(0, [256], PARAMS, 0)
    assert scored(bridged, [row], [[]]).shape[-1] == bridged.bridge.draft.head_size
    assert scored(bridged, [Row(1, [0xF0], PARAMS, 0)], [[]]).shape[0] == 1
