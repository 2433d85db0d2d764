"""Trees grown from the likeliest nodes, and what the acceptance model learns from them."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import SamplingParams
from slipstream.core.types import Row
from slipstream.draft_length.acceptance_model import AcceptanceModel
from slipstream.drafters._tree_growth import UNLIKELY, Alternatives, Follower, Node, grown, learn

STEADY = settings(max_examples=100)
DEPTH = 4  # paths end there
Path = tuple[int, ...]
shares = st.lists(st.floats(0.01, 0.99), min_size=1, max_size=3)


def likely(chances: list[list[float]], path: Path, prob: float) -> Iterator[Follower]:
    """Tokens 0, 1, ... after each path, with the chances given for its depth."""
    if len(path) < DEPTH:
        at_most = prob
        for token, chance in enumerate(chances[len(path)]):
            at_most = min(at_most, prob * chance)
            yield Follower(token, 0, at_most, (*path, token))


def everything(chances: list[list[float]], path: Path = (), prob: float = 1.0) -> Iterator[tuple[Path, float]]:
    for follower in likely(chances, path, prob):
        yield follower.place, follower.prob
        yield from everything(chances, follower.place, follower.prob)


@STEADY
@given(st.lists(shares, min_size=DEPTH, max_size=DEPTH), st.integers(1, 20))
def test_a_tree_consists_of_the_likeliest_nodes(chances: list[list[float]], length: int) -> None:
    nodes, prob_of_path = grown(lambda path, prob: likely(chances, path, prob), (), length), dict(everything(chances))
    probs = sorted((prob for prob in prob_of_path.values() if prob >= UNLIKELY), reverse=True)
    assert [node.prob for node in nodes] == probs[:length]
    paths: list[Path] = []
    for node in nodes:
        paths.append((*(paths[node.parent] if node.parent >= 0 else ()), node.token))
    assert len(set(paths)) == len(paths) and [prob_of_path[path] for path in paths] == [node.prob for node in nodes]


def test_a_tree_of_a_given_shape_is_a_chain_with_leaves() -> None:
    nodes = grown(lambda path, prob: likely([[0.5, 0.4]] * DEPTH, path, prob), (), 6, deepest=3)
    assert [(node.parent, node.token) for node in nodes] == [(-1, 0), (-1, 1), (0, 0), (0, 1), (2, 0), (2, 1)]


def test_chances_of_runners_up_are_shares_of_the_remaining_probability() -> None:
    chances = {0: 0.5, 1: 0.4, 2: 0.9}
    ranked = [(7, 0, "a"), (8, 0, "b"), (9, 0, "c")]
    followers = [*Alternatives(chances.__getitem__, 3, 1, ranks=3).followers(ranked, 0.8)]
    assert [follower.token for follower in followers] == [7, 8, 9] and [follower.kind for follower in followers] == [
        0,
        1,
        2,
    ]
    assert [round(follower.prob, 3) for follower in followers] == [
        0.4,
        0.16,
        0.16,
    ]  # the last would be 0.24 * 0.9, but none exceeds the one before
    assert len([*Alternatives(chances.__getitem__, 2, 1, ranks=2).followers(ranked, 0.8)]) == 2
    # too little probability is left for a second
    assert len([*Alternatives({0: 0.95, 1: 0.5}.__getitem__, 3, 1, ranks=2).followers(ranked, 0.8)]) == 1


def test_a_tree_teaches_along_the_accepted_path_up_to_its_first_wrong_token() -> None:
    model, row = AcceptanceModel([0.5] * 4, shared=True), Row(0, [1], SamplingParams(), seed=0)
    nodes = [Node(-1, 5, 0, 0.5), Node(-1, 6, 1, 0.25), Node(0, 7, 2, 0.2), Node(1, 8, 3, 0.1)]
    fresh = Row(1, [1], SamplingParams(), seed=0)
    row.tokens += [6, 9]
    learn(model, row, 1, nodes)
    wrong, right, unreached, next_wrong = (model.chance(fresh, kind) for kind in range(4))
    assert wrong < 0.5 < right and next_wrong < 0.5 and unreached == 0.5
