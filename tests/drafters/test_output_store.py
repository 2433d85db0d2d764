"""Past outputs: kept within a budget, drafted from, and refused from damaged or foreign files."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder, UsageError
from slipstream.core.rng import Race
from slipstream.core.types import Row
from slipstream.drafters import Setup, load
from slipstream.drafters.suffix.automaton import LIMIT
from slipstream.drafters.suffix.output_store import FIELDS, SuffixStore
from slipstream.drafters.suffix.suffix_drafter import OPENING, SuffixDrafter
from slipstream.models.toy import VOCAB_SIZE
from slipstream.sampling.sampler import Sampler
from tests.support.markers import subcases

CPU = torch.device("cpu")
SIZE = 1000
PARAMS = SamplingParams(max_tokens=1000)


def row_of(tokens: Sequence[int], output: Sequence[int] = ()) -> Row:
    row = Row(0, list(tokens), PARAMS, seed=0)
    row.tokens += output
    return row


def propose(drafter: SuffixDrafter, rows: Sequence[Row], length: int = 4) -> list[list[int]]:
    draft = drafter.propose(rows, [length] * len(rows), Sampler(list(rows), Race(SIZE, CPU), SIZE, CPU))
    return [draft.tokens[i, :n].tolist() for i, n in enumerate(draft.lengths)]


def stored_texts(drafter: SuffixDrafter) -> list[list[int]]:
    drafter.num_stored_tokens  # noqa: B018  takes in the outputs of rows that have ended
    return list(drafter._store.texts())


# what is kept


def test_the_oldest_texts_go_and_the_budget_is_never_exceeded() -> None:
    store = SuffixStore(SIZE, 100)
    texts = [[number] * (number % 17 + 1) for number in range(60)]
    for number, text in enumerate(texts, 1):
        store.add(text)
        texts_kept = list(store.texts())
        assert texts_kept == texts[number - len(texts_kept) : number]
        assert sum(map(len, texts_kept)) == store.num_tokens <= 100
        assert number < 20 or store.num_tokens > 50 - 17
        first_tokens = {text[0] for text in texts_kept}
        tokens_found = {n for n in range(number) for automaton in store.automata if automaton.find([n]).length}
        assert tokens_found == first_tokens


def bytes_of(store: SuffixStore) -> int:
    """Bytes used: 4 per token for the texts, the automata's arrays, and 28 per int in a dict."""
    size = 4 * (store.num_tokens + sum(map(len, store._seeded)))
    for automaton in store.automata:
        arrays = (automaton._link, automaton._length, automaton._count, automaton._token, automaton._target)
        branches = automaton._branches.values()
        size += sum(map(sys.getsizeof, (*arrays, automaton._branches, *branches)))
        size += 28 * sum(1 + 2 * len(branch) for branch in branches)
    return size


@pytest.mark.parametrize("is_seeded", [False, True])
def test_memory_is_bounded_by_the_budget(is_seeded: bool) -> None:
    store = SuffixStore(SIZE, 1000)
    sizes = []
    for number in range(100):
        text = [(number * 37 + i * i) % SIZE for i in range(100)]
        if is_seeded:
            store.seed([text])
        else:
            store.add(text)
        sizes.append(bytes_of(store))
    assert max(sizes[50:]) <= max(sizes[:50])
    assert 20 * store.num_tokens < sizes[-1] < 500 * store.num_tokens <= 500 * 1000


def test_a_text_longer_than_half_of_the_budget_is_cut_to_its_end() -> None:
    store = SuffixStore(SIZE, 100)
    store.add(list(range(80)))
    assert list(store.texts()) == [list(range(30, 80))]


def test_nothing_is_kept_without_a_budget_or_of_an_empty_text() -> None:
    store = SuffixStore(SIZE, 0)
    store.add([1, 2, 3])
    store.seed([[4, 5]])
    assert store.num_tokens == 0 and store.automata == []
    store = SuffixStore(SIZE, 100)
    store.add([])
    assert store.num_tokens == 0 and store.automata == []


def test_no_match_spans_two_texts() -> None:
    store = SuffixStore(SIZE, 100)
    store.add([1, 2])
    store.add([3, 4])
    assert [automaton.find([2, 3]).length for automaton in store.automata] == [1]
    assert [automaton.followed(automaton.find([1, 2])).length for automaton in store.automata] == [0]


# outputs of rows


def test_an_output_is_kept_with_the_end_of_its_prompt_once_its_row_has_finished() -> None:
    drafter, row = SuffixDrafter(SIZE), row_of(range(100, 140), [5, 6])
    propose(drafter, [row])
    row.tokens += [7, 8]
    propose(drafter, [row])
    assert stored_texts(drafter) == []
    row.tokens += [9]  # committed after the last propose
    row.finish_reason = "length"
    assert stored_texts(drafter) == [[*range(140 - OPENING, 140), 5, 6, 7, 8, 9]]


def test_an_output_is_kept_when_its_row_is_dropped_unfinished() -> None:
    drafter, row = SuffixDrafter(SIZE), row_of([1, 2])
    propose(drafter, [row])
    row.tokens += [3, 4]
    del row
    gc.collect()
    assert stored_texts(drafter) == [[1, 2, 3, 4]]


@pytest.mark.parametrize(("output", "stored"), [([], []), ([3], [[1, 2, 3]])])
def test_only_rows_with_output_are_kept_drafted_for_or_not(output: list[int], stored: list[list[int]]) -> None:
    drafter, row = SuffixDrafter(SIZE), row_of([1, 2])
    assert propose(drafter, [row], 0) == [[]]
    row.tokens += output
    row.finish_reason = "stop"
    assert stored_texts(drafter) == stored


def test_a_finished_output_is_drafted_for_another_row() -> None:
    drafter, row = SuffixDrafter(SIZE), row_of([1, 2])
    waiting = row_of([50, 60, 3])
    assert propose(drafter, [row, waiting]) == [[], []]
    row.tokens += [3, 4, 5, 6]
    row.finish_reason = "stop"
    assert propose(drafter, [waiting]) == [[4, 5, 6]]
    waiting.tokens += [4]
    assert propose(drafter, [waiting]) == [[5, 6]]


def test_of_equal_matches_the_one_in_the_rows_own_text_is_followed() -> None:
    drafter = SuffixDrafter(SIZE)
    drafter.seed([[3, 4], [3, 4], [8, 3, 4]])
    assert propose(drafter, [row_of([3, 5, 9, 3])], 1) == [[5]]
    assert propose(drafter, [row_of([3, 5, 8, 3])], 1) == [[4]]


def test_a_continuation_may_come_from_the_older_half() -> None:
    drafter = SuffixDrafter(SIZE, outputs=2 * LIMIT)
    drafter.seed([[1, 2, 3, 4, 5], range(100, 100 + LIMIT)])
    assert len(drafter._store.automata) == 2
    assert propose(drafter, [row_of([1, 2])], 2) == [[3, 4]]
    assert propose(drafter, [row_of([100, 101])], 2) == [[102, 103]]


def test_a_repeated_request_takes_fewer_rounds_until_outputs_are_forgotten() -> None:
    drafter = SuffixDrafter(VOCAB_SIZE)
    decoder = SpeculativeDecoder("toy", drafter=drafter, num_draft_tokens=7)
    params = SamplingParams(max_tokens=60)
    first, second = (decoder.generate("The heron", params) for _ in range(2))
    assert second.token_ids == first.token_ids
    assert second.stats.num_rounds < first.stats.num_rounds
    drafter.forget()
    third = decoder.generate("The heron", params)
    assert third.stats.num_rounds == first.stats.num_rounds
    alone = SpeculativeDecoder("toy", drafter="suffix:outputs=0", num_draft_tokens=7)
    rounds = [alone.generate("The heron", params).stats.num_rounds for _ in range(2)]
    assert rounds == [first.stats.num_rounds] * 2


# seeds and files


def test_forgetting_drops_learned_texts_and_keeps_seeded_ones() -> None:
    drafter, row = SuffixDrafter(SIZE, outputs=100), row_of([1, 2], [3])
    drafter.seed([[7, 8, 9], np.array([5, 6])])
    propose(drafter, [row])
    row.finish_reason = "stop"
    assert stored_texts(drafter) == [[7, 8, 9], [5, 6], [1, 2, 3]]
    drafter.forget()
    assert stored_texts(drafter) == [[7, 8, 9], [5, 6]]
    drafter.seed([[4] * 50, [3] * 50])  # beyond the budget: the oldest texts do not come back
    drafter.forget()
    assert stored_texts(drafter) == [[4] * 50, [3] * 50]


@subcases(
    "texts, message",
    [
        ([[1], [2, SIZE]], "text 1 holds 1000; allowed: ids from 0 to 999"),
        ([[-1]], "text 0 holds -1"),
        ([[1.5]], r"text 0 holds 1\.5"),
        ([[True]], "text 0 holds True"),
        (["ab"], "text 0 holds 'a'"),
        ([1, 2], "text 0 is 1; allowed: a list of token ids"),
    ],
)
def test_a_seed_that_is_not_token_ids_is_refused_and_nothing_kept(texts: Any, message: str) -> None:
    drafter = SuffixDrafter(SIZE)
    with pytest.raises(UsageError, match=message):
        drafter.seed(texts)
    assert stored_texts(drafter) == []


def test_outputs_are_saved_and_loaded_again(tmp_path: Path) -> None:
    path, name = tmp_path / "answers.npz", str(tmp_path / "answers.npz")
    with pytest.raises(
        UsageError, match=r"answers.npz' is not a file; allowed: a file that SuffixDrafter.save\(FILE\)"
    ):
        load(f"suffix:store={name}", Setup(CPU, SIZE))
    saving = SuffixDrafter(SIZE, path=path)
    row = row_of([1, 2], [3, 4])
    propose(saving, [row])
    row.finish_reason = "stop"
    saving.save()
    assert [file.name for file in tmp_path.iterdir()] == ["answers.npz"]
    loading = load(f"suffix:2+p=30+store={name}", Setup(CPU, SIZE))
    assert isinstance(loading, SuffixDrafter) and stored_texts(loading) == [[1, 2, 3, 4]]
    assert propose(loading, [row_of([9, 2, 3])]) == [[4]]
    loading.load(path)
    assert stored_texts(loading) == [[1, 2, 3, 4]] * 2
    empty = SuffixDrafter(SIZE)
    empty.save(tmp_path / "empty.npz")
    empty.load(str(tmp_path / "empty.npz"))
    assert stored_texts(empty) == []


def test_a_smaller_budget_keeps_the_newest_of_a_file(tmp_path: Path) -> None:
    large, small = SuffixStore(SIZE, 1000), SuffixStore(SIZE, 100)
    texts = [[number] * 10 for number in range(40)]
    large.seed(texts)
    large.save(tmp_path / "s.npz")
    small.load(tmp_path / "s.npz")
    assert list(small.texts()) == texts[-len(list(small.texts())) :]
    assert 50 <= small.num_tokens <= 100


def save_two_texts(path: Path, tokenizer: str = "") -> dict[str, Any]:
    """Writes a store of two texts and returns its parts."""
    store = SuffixStore(SIZE, 100, tokenizer)
    store.seed([[1, 2, 3], [4, 5]])
    store.save(path)
    with np.load(path) as file:
        return {name: file[name] for name in FIELDS}


def check_refusal(path: Path, message: str, vocab_size: int = SIZE, tokenizer: str = "") -> None:
    store = SuffixStore(vocab_size, 100, tokenizer)
    with pytest.raises(UsageError, match=message) as error:
        store.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert store.num_tokens == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "format 'other'"),
        ({"vocab_size": np.array(SIZE + 1)}, "vocabulary of 1001; allowed: 1000"),
        ({"lengths": np.array([3, 3])}, "damaged: its texts' lengths do not fit its 5 tokens"),
        ({"lengths": np.array([6, -1])}, "damaged"),
        ({"lengths": np.array([[3, 2]])}, "damaged"),
        ({"tokens": np.array([1.0] * 5)}, "damaged"),
        ({"tokens": np.array([1, 2, 3, 4, SIZE])}, "damaged: it holds the token id 1000"),
        ({"tokens": np.array([1, 2, 3, 4, -7])}, "damaged: it holds the token id -7"),
        ({"tokens": np.array([{}] * 5)}, "cannot be read"),  # would need pickle, which runs code
    ],
)
def test_a_file_with_a_wrong_part_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "s.npz"
    np.savez(path, **(save_two_texts(path) | changes))
    check_refusal(path, message)


@pytest.mark.parametrize("missing", FIELDS)
def test_a_file_without_a_part_is_refused(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "s.npz"
    parts = save_two_texts(path)
    del parts[missing]
    np.savez(path, **parts)
    check_refusal(path, "cannot be read")


def test_a_damaged_file_is_refused_wherever_it_is_cut_or_changed(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    save_two_texts(path)
    content = path.read_bytes()
    for size in (0, 1, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        check_refusal(path, "cannot be read")
    path.write_bytes(b"no store at all")
    check_refusal(path, "cannot be read")
    offset = content.index(np.array([1, 2, 3, 4, 5], dtype=np.int32).tobytes())
    path.write_bytes(content[:offset] + b"\xff" + content[offset + 1 :])
    check_refusal(path, "cannot be read")  # the archive's checksum
    np.save(tmp_path / "array.npy", np.arange(3))
    check_refusal(tmp_path / "array.npy", "cannot be read")


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    check_refusal(tmp_path / "none.npz", "does not exist")
    check_refusal(tmp_path, "cannot be read")
    with pytest.raises(SlipstreamError, match="cannot be written: no such file"):
        SuffixStore(SIZE, 100).save(tmp_path / "no" / "s.npz")
    with pytest.raises(UsageError, match="no path"):
        SuffixDrafter(SIZE).save()


def test_a_file_of_another_tokenizer_is_refused_where_both_are_known(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    save_two_texts(path, "alpha")
    check_refusal(path, "tokenizer 'alpha'; allowed: 'beta'", tokenizer="beta")
    for name in ("alpha", ""):
        drafter = SuffixDrafter(SIZE, tokenizer=name)
        drafter.load(path)
        assert drafter.num_stored_tokens == 5


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.npz"
    save_two_texts(path)
    content = path.read_bytes()

    def full(file: Any, **parts: Any) -> None:
        file.write(b"PK")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(SlipstreamError, match="cannot be written: no space left"):
        SuffixStore(SIZE, 100).save(path)
    assert path.read_bytes() == content and len(list(tmp_path.iterdir())) == 1
