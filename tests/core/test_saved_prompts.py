"""What ended rows have left is kept in idle slots, the last used longest, and changes no logits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from slipstream import SamplingParams
from slipstream.core.kv_slots import EXACT_FIT, Shapes
from slipstream.core.scheduler import Scheduler
from slipstream.core.session import Session
from slipstream.core.types import Row
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


class Asked:
    """A session that is asked one prompt after the other, each continuing its own."""

    def __init__(self, slots: int, shapes: Shapes = EXACT_FIT) -> None:
        self.session, self.steps = Session(HashBackend(), shapes), 0
        self.session.reserve(slots, 400)

    def read(self, tokens: Sequence[int], group: str = "") -> int:
        """How many tokens of a prompt are read anew; its row ends after a round whose logits are the right ones."""
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
@pytest.mark.parametrize(("slots", "kept"), [(1, False), (2, False), (4, True), (6, True)])
def test_prompts_that_take_turns_are_read_once_where_idle_slots_are_free(
    slots: int, kept: bool, shapes: Shapes
) -> None:
    asked = Asked(slots, shapes)
    for prompt in PROMPTS[:3]:
        assert asked.read(prompt) >= LENGTH - 17
    again = [asked.read(prompt) for prompt in PROMPTS[:3] * 2]
    assert (max(again) == 0) == kept and (kept or sum(again) > 2 * LENGTH)


def test_the_prompt_that_was_used_last_is_kept_longest() -> None:
    asked = Asked(4)
    for number in (0, 1, 2, 0, 3, 4):  # the last of which takes the place of number 1
        asked.read(PROMPTS[number])
    assert [asked.read(PROMPTS[number]) > 0 for number in (0, 3, 4, 1)] == [False, False, False, True]


def test_a_text_that_goes_on_and_one_that_repeats_take_no_place_from_others() -> None:
    asked = Asked(3)
    asked.read(PROMPTS[0])
    text = PROMPTS[1]
    for turn in range(6):
        asked.read(text)
        asked.read(text)
        text = [*text, 3, turn, 5]
    assert asked.read(PROMPTS[0]) == 0


def test_a_prompt_of_another_group_counts_as_another_prompt() -> None:
    asked = Asked(3)
    assert asked.read(PROMPTS[0], "ann") > 0 and asked.read(PROMPTS[0], "bob") > 0
    assert asked.read(PROMPTS[0], "ann") == asked.read(PROMPTS[0], "bob") == 0


def test_slots_of_rows_under_way_are_left_alone() -> None:
    session = Session(HashBackend())
    session.reserve(4, 400)
    rows = [new_row(prompt, i) for i, prompt in enumerate(PROMPTS[:4])]
    session.score(rows, *table([[]] * 4))
    rows[0].finish_reason = "stop"
    before, new = session.prefill_tokens, new_row([6] * LENGTH)
    session.score([new, *rows[1:]], *table([[]] * 4))  # there is no idle slot for what the first has left
    assert session.prefill_tokens - before == LENGTH - 1
    assert [state.row for state in session.slot_states] == [new, *rows[1:]]


@pytest.mark.parametrize(("num_slots", "read"), [(0, 3), (4, 1)])
def test_a_scheduler_reads_repeated_prompts_once_if_it_has_more_slots(num_slots: int, read: int) -> None:
    """Three texts, one at a time and three times each; every text is the one that it has in an engine of its own."""

    def made(slots: int) -> Scheduler:
        return Scheduler(engine(Session(ToyBackend(3), Shapes((), 16)), NgramDrafter(), Fixed(3)), num_slots=slots)

    def text(of: Scheduler, number: int) -> list[int]:
        prompt = TEXT[20 * number :][:LENGTH]
        row = Row(number, prompt, SamplingParams(max_tokens=6, temperature=0.8, seed=1), 1)
        list(of.run([row]))
        return row.output

    one = made(num_slots)
    for number in [0, 1, 2] * 3:
        assert text(one, number) == text(made(0), number)
    assert (one.engine.target.prefill_tokens < (read + 1) * 3 * LENGTH) and (
        one.engine.target.prefill_tokens > (read - 1) * 3 * LENGTH
    )


def test_drafts_fill_the_widest_forward_beside_what_the_rows_lack() -> None:
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
