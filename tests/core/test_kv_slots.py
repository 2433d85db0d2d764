"""Prompts of ended rows stay cached in idle slots, long and recently used ones longest, and change no logits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from slipstream import SamplingParams
from slipstream.core.kv_slots import EXACT_FIT, Shapes, common_prefix
from slipstream.core.scheduler import Scheduler
from slipstream.core.session import Session
from slipstream.core.types import PromptImages, Row
from slipstream.draft_length.policies import Fixed
from slipstream.drafters.ngram import NgramDrafter
from slipstream.models.toy import FABLE, ToyBackend
from tests.support.engine_parts import engine
from tests.support.session_cases import commit, from_scratch, new_row, table
from tests.support.tiny_models import HashBackend

pytestmark = pytest.mark.usefixtures("cache_audit")

LENGTH = 64
PROMPTS = [[(i * j + j // 3 + i) % 7 for j in range(LENGTH)] for i in range(1, 6)]
CHUNKS = Shapes((4, 8, 16, 32), 16, 64, reuse=16)
TEXT = list(FABLE.replace("\n", " ").encode())


class OnePromptAtATime:
    """A session that scores one prompt after the other, each in a row of its own."""

    def __init__(self, slots: int, shapes: Shapes = EXACT_FIT) -> None:
        self.session, self.steps = Session(HashBackend(), shapes), 0
        self.session.reserve(slots, 400)

    def read(self, tokens: Sequence[int], group: str = "") -> int:
        """Scores the prompt in a row that ends after one round, and returns how many tokens were not cached."""
        row, before = new_row(tokens), self.session.prefill_tokens
        row.group = group
        logits = self.session.score([row], *table([[1]]))
        torch.testing.assert_close(logits[0], from_scratch(HashBackend, row, [1]), rtol=0, atol=0)
        commit(row, [1], 1, 2)
        self.steps += 1
        object.__setattr__(row.rounds[-1], "step", self.steps)
        row.finish_reason = "stop"
        return self.session.prefill_tokens - before


@pytest.mark.parametrize("shapes", [EXACT_FIT, CHUNKS], ids=["exact", "chunks"])
@pytest.mark.parametrize(("slots", "is_kept"), [(1, False), (2, False), (4, True), (6, True)])
def test_alternating_prompts_are_read_once_if_there_are_idle_slots(slots: int, is_kept: bool, shapes: Shapes) -> None:
    cached_prompts = OnePromptAtATime(slots, shapes)
    for prompt in PROMPTS[:3]:
        assert cached_prompts.read(prompt) >= LENGTH - 17
    read_again = [cached_prompts.read(prompt) for prompt in PROMPTS[:3] * 2]
    assert (max(read_again) == 0) == is_kept and (is_kept or sum(read_again) > 2 * LENGTH)


def test_a_common_prefix_ends_where_one_row_has_another_image() -> None:
    def row(**digests: str) -> Row:
        images = PromptImages({int(at[1:]): digest for at, digest in digests.items()}, torch.empty(0), torch.empty(0))
        made = new_row([5] * 20)
        made.images = images if digests else None
        return made

    cases = [({}, {}, 19), ({"p4": "a"}, {"p4": "a"}, 19), ({"p4": "a"}, {"p4": "b"}, 4), ({"p4": "a"}, {}, 4)]
    cases += [({"p4": "a", "p9": "b"}, {"p4": "a", "p9": "c"}, 9), ({"p4": "a", "p9": "b"}, {"p4": "a"}, 9)]
    for first, second, length in cases:
        assert (
            common_prefix(row(**first), row(**second), 19) == common_prefix(row(**second), row(**first), 19) == length
        )


class SeesBlocks(HashBackend):
    """Notes the positions of its forwards, and the images that it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[int, int]] = []
        self.shown: PromptImages | None = None

    def show(self, slot: int, images: PromptImages | None) -> None:
        self.shown = images

    def forward(self, tokens: torch.Tensor, starts: list[int], *, first_slot: int, logits: bool) -> torch.Tensor:
        self.read.append((starts[0], starts[0] + tokens.shape[1]))
        return super().forward(tokens, starts, first_slot=first_slot, logits=logits)


@pytest.mark.parametrize(
    ("blocks", "end", "pieces"),
    [
        (((6, 11),), 20, [(0, 4), (4, 6), (6, 11), (11, 15), (15, 19)]),  # chunks of 4, but for the block
        (((2, 9), (9, 12)), 14, [(0, 2), (2, 9), (9, 12), (12, 13)]),
        (((8, 14),), 14, [(0, 4), (4, 8), (8, 14)]),  # at the end of the prompt
    ],
)
def test_tokens_that_see_each_other_are_read_in_one_forward(
    blocks: tuple[tuple[int, int], ...], end: int, pieces: list[tuple[int, int]]
) -> None:
    backend = SeesBlocks()
    session = Session(backend, Shapes(widths=(), chunk=4), shows_images=True)
    session.reserve(2, 100)
    row = new_row(list(range(end)))
    row.images = PromptImages({blocks[0][0]: "a"}, torch.empty(0), torch.empty(0), blocks=blocks)
    session.prefill([row])
    assert backend.shown is row.images and backend.read == pieces
    logits = session.score([row], *table([[1]]))
    torch.testing.assert_close(logits[0], from_scratch(HashBackend, row, [1]), rtol=0, atol=0)
    same = new_row(list(range(end)))
    same.images = row.images
    assert not any(first < session.num_cached(same) < last for first, last in blocks)


def test_the_least_recently_used_prompt_is_evicted_first() -> None:
    cached_prompts = OnePromptAtATime(4)
    for number in (0, 1, 2, 0, 3, 4):  # the last of them evicts number 1
        cached_prompts.read(PROMPTS[number])
    assert [cached_prompts.read(PROMPTS[number]) > 0 for number in (0, 3, 4, 1)] == [False, False, False, True]


def test_a_long_prompt_is_evicted_once_as_many_other_tokens_have_been_read() -> None:
    long, cached_prompts = [*PROMPTS[4], *PROMPTS[3]] * 2, OnePromptAtATime(3)
    for number, is_kept in ((3, True), (12, False)):
        cached_prompts.read(long)
        for other in range(number):
            cached_prompts.read([other % 7, *PROMPTS[other % 3][1:], 6 - other % 5])
        assert (cached_prompts.read(long) == 0) == is_kept


def test_a_continued_or_repeated_text_evicts_no_other_prompt() -> None:
    cached_prompts = OnePromptAtATime(3)
    cached_prompts.read(PROMPTS[0])
    text = PROMPTS[1]
    for turn in range(6):
        cached_prompts.read(text)
        cached_prompts.read(text)
        text = [*text, 3, turn, 5]
    assert cached_prompts.read(PROMPTS[0]) == 0


def test_prompts_are_not_shared_between_groups() -> None:
    cached_prompts = OnePromptAtATime(3)
    assert cached_prompts.read(PROMPTS[0], "ann") > 0 and cached_prompts.read(PROMPTS[0], "bob") > 0
    assert cached_prompts.read(PROMPTS[0], "ann") == cached_prompts.read(PROMPTS[0], "bob") == 0


def test_slots_of_running_rows_are_not_reused() -> None:
    session = Session(HashBackend())
    session.reserve(4, 400)
    rows = [new_row(prompt, i) for i, prompt in enumerate(PROMPTS[:4])]
    session.score(rows, *table([[]] * 4))
    rows[0].finish_reason = "stop"
    before, new = session.prefill_tokens, new_row([6] * LENGTH)
    session.score([new, *rows[1:]], *table([[]] * 4))  # no slot is idle, so the first row's cached tokens are lost
    assert session.prefill_tokens - before == LENGTH - 1
    assert [state.row for state in session.slot_states] == [new, *rows[1:]]


@pytest.mark.parametrize(("num_slots", "times_read"), [(0, 3), (4, 1)])
def test_a_scheduler_reads_repeated_prompts_once_if_it_has_more_slots(num_slots: int, times_read: int) -> None:
    """Three prompts, one at a time and three times each; every text equals that of a new scheduler."""

    def new_scheduler(slots: int) -> Scheduler:
        return Scheduler(engine(Session(ToyBackend(3), Shapes((), 16)), NgramDrafter(), Fixed(3)), num_slots=slots)

    def text(scheduler: Scheduler, number: int) -> list[int]:
        prompt = TEXT[20 * number :][:LENGTH]
        row = Row(number, prompt, SamplingParams(max_tokens=6, temperature=0.8, seed=1), 1)
        list(scheduler.run([row]))
        return row.output

    shared = new_scheduler(num_slots)
    for number in [0, 1, 2] * 3:
        assert text(shared, number) == text(new_scheduler(0), number)
    per_reading = 3 * LENGTH
    assert (times_read - 1) * per_reading < shared.engine.target.prefill_tokens < (times_read + 1) * per_reading


def test_the_longest_draft_fills_the_widest_forward_beside_the_tokens_not_yet_cached() -> None:
    session = Session(HashBackend(), Shapes((4, 8, 16, 32), 16))
    session.reserve(2, 400)
    rows = [new_row(PROMPTS[0]), new_row(PROMPTS[1][:3], 1)]
    assert session.table.longest_draft(rows) == session.longest_draft == 24  # as long as nothing is read
    session.prefill(rows)
    assert session.table.longest_draft(rows) == 31
    rows[1].tokens += [4, 5]
    assert session.table.longest_draft(rows[:1]) == 31 and session.table.longest_draft(rows) == 29
    session.score(rows, *table([[1] * 29, [2] * 29]))
    assert session.backend.forwards[-1] == (2, 32, True)  # type: ignore[attr-defined]
    assert Session(HashBackend()).table.longest_draft(rows) is None
