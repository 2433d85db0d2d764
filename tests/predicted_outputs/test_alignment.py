"""The position in a prediction advances with the text, and is found again after every kind of edit."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.predicted_outputs.alignment import LIMIT, Alignment, Guess, Place

LINE, OTHER = 0, 998  # the tokens that end a line
OLD = [1, 2, 3, 4, LINE, 5, 6, 7, 8, LINE, 9, 10, 11, 12, LINE, 13, 14, 15, 16]


def after(text: Sequence[int], prediction: Sequence[int] = OLD) -> Place | None:
    alignment = Alignment(prediction, lambda token: token in (LINE, OTHER))
    alignment.read(text)
    return alignment.place


def goes_on(text: Sequence[int], prediction: Sequence[int] = OLD) -> list[int]:
    place = after(text, prediction)
    return [] if place is None else list(prediction[place.start :])


def test_the_place_starts_at_the_beginning_and_moves_with_the_text() -> None:
    assert after([]) == Place(0, 0, Guess.OPENING)
    for length in range(1, len(OLD) + 1):
        assert after(OLD[:length]) == Place(length, length)
    assert goes_on(OLD) == []


def test_after_a_replaced_token_the_place_moves_on_by_one() -> None:
    assert after([1, 2, 77]) == Place(3, 2, Guess.ONE_REPLACED)
    assert after([1, 2, 77, 4]) == Place(4, 3)


def test_one_token_may_be_replaced_by_two_or_three() -> None:
    assert goes_on([1, 2, 77, 78]) == goes_on([1, 2, 77, 78, 79]) == OLD[3:]
    assert after([1, 2, 77, 78, 79, 80]) is None  # four tokens are too many to replace one
    assert goes_on([1, 2, 77, 78, 79, 80, 4]) == OLD[4:]


def test_omitted_tokens_are_skipped() -> None:
    assert after([1, 2, 6]) == Place(7, 1, Guess.LEFT_OUT)
    assert goes_on([1, 2, 6, 7]) == OLD[8:]


def test_the_place_is_found_again_after_inserted_tokens() -> None:
    for inserted in ([70, 71], [70, 71, 72, 73, 74], list(range(70, 120))):
        assert goes_on([1, 2, *inserted, 3, 4]) == OLD[4:]


def test_after_an_inserted_line_the_next_line_is_expected() -> None:
    text = [1, 2, 3, 4, LINE, 70, 71, 72, LINE]
    assert after(text) == Place(5, 0, Guess.NEXT_LINE) and goes_on([*text, 5]) == OLD[6:]


def test_after_a_rewritten_line_the_next_line_is_expected() -> None:
    assert goes_on([1, 2, 3, 4, LINE, 5, 70, 71, LINE]) == OLD[10:]


def test_an_omitted_line_is_skipped_at_the_first_token_of_the_next() -> None:
    assert goes_on([1, 2, 3, 4, LINE, 9]) == OLD[11:]


def test_one_matching_token_is_enough_only_at_the_beginning_of_a_line() -> None:
    far = [*OLD, *range(20, 200), LINE, 300, 301, 302]
    assert after([570, 571, OTHER, 300], far) == Place(far.index(300) + 1, 1)
    assert after([570, 571, 572, 573, 300], far) is None
    assert after([570, 571, 572, 573, 300, 301], far) == Place(far.index(301) + 1, 2)


def test_a_code_fence_before_the_prediction_is_skipped() -> None:
    assert after([90, 91, LINE]) == Place(0, 0, Guess.NEXT_LINE)
    assert goes_on([90, 91, LINE, 1]) == OLD[1:]


def test_a_first_token_with_a_leading_space_counts_as_one_replaced_token() -> None:
    assert goes_on([99]) == OLD[1:]  # " def" instead of "def"


def test_tokens_merged_differently_at_an_edit_are_skipped() -> None:
    merged = 50  # stands for 2, 3 and a new character
    assert goes_on([1, merged]) == OLD[2:]
    assert goes_on([1, merged, 4]) == OLD[4:] and goes_on([1, merged, 4, LINE, 5]) == OLD[6:]


def test_the_nearest_of_equal_matches_ahead_is_taken() -> None:
    repeated = [1, 2, 3, 40, 41, 1, 2, 3, 50, 51, 1, 2, 3, 60, 61]
    assert goes_on([1, 2, 3, 40, 41, 1, 2, 3, 70, 71, 72, 73, 2, 3], repeated) == [60, 61]


def test_the_longest_of_several_matches_is_taken() -> None:
    repeated = [1, 2, 3, 40, *range(100, 120), 7, 1, 2, 3, 50, *range(120, 140), 8, 9, 1, 2, 3, 60]
    assert goes_on([70, 71, 72, 73, 9, 1, 2, 3], repeated) == [60]


def test_a_text_that_returns_to_an_earlier_place_is_followed_there() -> None:
    assert goes_on([*OLD, 70, 71, 72, 73, 5, 6]) == OLD[7:]


def test_a_prediction_that_repeats_one_token_is_followed() -> None:
    assert goes_on([5] * 40, [5] * 60) == [5] * 20
    place = after([5, 9, *[5] * (LIMIT + 5)], [5] * 60)
    assert place is not None and place.agreeing > 1


edits = st.lists(
    st.tuples(st.integers(0, 59), st.integers(0, 6), st.lists(st.integers(100, 120), max_size=6)), max_size=4
)


@settings(max_examples=150)
@given(edits, st.integers(0, 2**32))
def test_after_any_edit_the_place_is_found_within_two_tokens(changes: list[tuple[int, int, list[int]]], _: int) -> None:
    """All tokens of the prediction are different, so that the position is unambiguous."""
    old = list(range(60))
    text, at = list[int](), 0
    for start, gone, new in sorted(changes):
        if start >= at:
            text += [*old[at:start], *new]
            at = start + gone
    text += old[at:]
    alignment = Alignment(old, lambda token: False)
    agreed, last = 0, -1
    for token in text:
        alignment.read([token])
        agreed = agreed + 1 if token < 60 and (agreed == 0 or token == last + 1) else int(token < 60)
        last = token
        if agreed >= 2:
            assert alignment.place is not None and alignment.place.start == token + 1


def test_an_edit_that_was_made_is_expected_again() -> None:
    """`data` (2) was replaced by `readings` (70, 71) once; the next `data` is predicted as `readings`."""
    old = [1, 2, 3, 4, 5, 2, 6, 7, 8, 2, 9]
    alignment = Alignment(old, lambda token: False)
    alignment.read([1, 70, 71, 3, 4])
    assert alignment.place is not None
    assert alignment.prediction[alignment.place.start :] == [5, 70, 71, 6, 7, 8, 70, 71, 9]


def test_after_an_unchanged_use_a_rewrite_is_expected_only_from_the_second_time() -> None:
    old = [1, 2, 3, 2, 4, 5, 2, 6, 7, 2, 8]
    alignment = Alignment(old, lambda token: False)
    alignment.read([1, 2, 3, 70, 4])
    assert alignment.prediction == old
    alignment.read([5, 70, 6])
    assert alignment.prediction == [*old[:9], 70, 8]


def test_a_token_expected_to_be_rewritten_but_unchanged_is_still_followed() -> None:
    old = [1, 2, 3, 4, 5, 2, 6, 7, 8]
    alignment = Alignment(old, lambda token: False)
    alignment.read([1, 70, 71, 3, 4, 5, 2, 6, 7])
    assert alignment.place is not None and alignment.prediction[alignment.place.start :] == [8]


def test_an_edit_that_would_make_the_prediction_far_longer_is_not_expected_again() -> None:
    prediction = [1000, 1, 1001, 1002, *[1, 5] * 200]  # each later 1 would become eight tokens, which contain 1 again
    alignment = Alignment(prediction, lambda _: False)
    alignment.read([1000, *[10, 11] * 4, 1001, 1002, 1])
    assert alignment.prediction == prediction
    assert alignment.place is not None and prediction[alignment.place.start] == 5
    renamed = Alignment(prediction, lambda _: False)
    renamed.read([1000, 10, 1001, 1002])
    assert renamed.prediction == [*prediction[:4], *[10, 5] * 200]
