"""Trees grown where they are likely: the likeliest nodes of all, and what is learned of them."""

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
    """Tokens 0, 1, ... after each path; their chances are those of its depth."""
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
def test_the_nodes_are_the_likeliest_of_all(chances: list[list[float]], length: int) -> None:
    nodes, known = grown(lambda path, prob: likely(chances, path, prob), (), length), dict(everything(chances))
    probs = sorted((prob for prob in known.values() if prob >= UNLIKELY), reverse=True)
    assert [node.prob for node in nodes] == probs[:length]
    paths: list[Path] = []
    for node in nodes:
        paths.append((*(paths[node.parent] if node.parent >= 0 else ()), node.token))
    assert len(set(paths)) == len(paths) and [known[path] for path in paths] == [node.prob for node in nodes]


def test_a_tree_of_a_given_shape_is_a_chain_with_leaves() -> None:
    nodes = grown(lambda path, prob: likely([[0.5, 0.4]] * DEPTH, path, prob), (), 6, deepest=3)
    assert [(node.parent, node.token) for node in nodes] == [(-1, 0), (-1, 1), (0, 0), (0, 1), (2, 0), (2, 1)]


def test_chances_of_runners_up_are_of_what_is_left() -> None:
    told = {0: 0.5, 1: 0.4, 2: 0.9}
    known = [(7, 0, "a"), (8, 0, "b"), (9, 0, "c")]
    found = [*Alternatives(told.__getitem__, 3, 1, ranks=3).followers(known, 0.8)]
    assert [one.token for one in found] == [7, 8, 9] and [one.kind for one in found] == [0, 1, 2]
    assert [round(one.prob, 3) for one in found] == [0.4, 0.16, 0.16]  # the last: 0.24 * 0.9, but no more than before
    assert len([*Alternatives(told.__getitem__, 2, 1, ranks=2).followers(known, 0.8)]) == 2
    assert (
        len([*Alternatives({0: 0.95, 1: 0.5}.__getitem__, 3, 1, ranks=2).followers(known, 0.8)]) == 1
    )  # too little is left


def test_a_tree_teaches_up_to_the_tokens_that_came() -> None:
    model, row = AcceptanceModel([0.5] * 4, shared=True), Row(0, [1], SamplingParams(), seed=0)
    nodes = [Node(-1, 5, 0, 0.5), Node(-1, 6, 1, 0.25), Node(0, 7, 2, 0.2), Node(1, 8, 3, 0.1)]
    fresh = Row(1, [1], SamplingParams(), seed=0)
    row.tokens += [6, 9]
    learn(model, row, 1, nodes)
    wrong, came, untold, missed = (model.chance(fresh, kind) for kind in range(4))
    assert wrong < 0.5 < came and missed < 0.5 and untold == 0.5
