"""All substrings of a growing text with their counts, in a few states per token: a suffix automaton.

Built online as by Blumer, Blumer, Haussler, Ehrenfeucht, Chen and Seiferas, "The smallest automaton recognizing the
subwords of a text" (1985): a state stands for the substrings that end at the same places of the text, its link leads
to the longest of their suffixes that also ends elsewhere. Added here: how often the substrings of a state occur, and
which token followed them most often, saved for contexts of up to `LIMIT` tokens so that a token costs a bounded number
of steps however the text repeats itself. This module knows neither rows nor drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

LIMIT = 32  # tokens of context; longer matches count as this long
SCANNED = 64  # followers of a context that are compared where several are wanted


class Match(NamedTuple):
    """The place of a text's end in an automaton: its last `length` tokens are among the substrings of `state`."""

    state: int = 0
    length: int = 0


NOTHING = Match()


class Step(NamedTuple):
    """One token of a walk, how often its context occurs, and how often it `followed` that context."""

    token: int
    context_length: int
    followed: int
    occurrences: int


class SuffixAutomaton:
    """The substrings of one or more texts, learned token by token.

    State 0 stands for the empty string; as a target it means "none". Each state's usual follower is in `_token` and
    `_target`: the most frequent, of equally frequent ones the latest or the first (see `learn`). A state with several
    followers has all of them in `_branches`. Counts are exact for substrings of up to LIMIT + 1 tokens.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._link, self._length, self._count = array("i", [-1]), array("i", [0]), array("i", [0])
        self._token, self._target = array("i", [-1]), array("i", [0])
        self._branches: dict[int, dict[int, int]] = {}
        self.begin()

    def begin(self) -> None:
        """Start another text with the next token; no substring spans two texts."""
        self._last, self._tip, self._tip_length = 0, 0, 0

    @property
    def end(self) -> Match:
        """The last tokens of the current text, at most LIMIT."""
        return Match(self._tip, self._tip_length)

    def learn(self, tokens: Iterable[int], *, newest: bool = True) -> None:
        """Append tokens to the current text; a few microseconds each.

        newest: of the tokens that followed a context equally often, the latest is its usual follower; else the first.
        """
        link, length, count = self._link, self._length, self._count
        usual, targets, branches = self._token, self._target, self._branches
        for token in tokens:
            # let the token lead on from the text, and from ever shorter suffixes until one that it has followed before
            new, state, target = len(length), self._last, 0
            while state >= 0:
                branch = branches.get(state)
                if usual[state] < 0:
                    usual[state], targets[state] = token, new
                elif usual[state] == token:
                    target = targets[state]
                    break
                elif branch is None:
                    branches[state] = {usual[state]: targets[state], token: new}
                elif token in branch:
                    target = branch[token]
                    break
                else:
                    branch[token] = new
                state = link[state]
            if state == self._last:  # an earlier text began like this one
                self._last = self._of_length(state, token, target)
            else:
                self._add_state(length[self._last] + 1, 0, 0, -1, 0)
                self._last = new
                if target:
                    link[new] = self._of_length(state, token, target)
            # count the token after its context and all suffixes of that; those with the same result count once
            state, counted = self._tip, -1
            tip = targets[state] if usual[state] == token else branches[state][token]
            while state >= 0:
                target = targets[state] if usual[state] == token else branches[state][token]
                if target != counted:
                    count[target] += 1
                    counted = target
                if usual[state] != token and count[target] + newest > count[targets[state]]:
                    usual[state], targets[state] = token, target
                state = link[state]
            count[0] += 1
            self._tip_length = min(self._tip_length + 1, LIMIT)
            while tip and length[link[tip]] >= self._tip_length:  # as `_holding`
                tip = link[tip]
            self._tip = tip
            self.num_tokens += 1

    def find(self, tokens: Sequence[int], start: Match = NOTHING) -> Match:
        """The longest suffix, of at most LIMIT tokens, of a text that occurs here.

        start: where the text stood before `tokens`, if nothing was learned since; else give the text's last LIMIT
        tokens.
        """
        state, length = start.state, start.length
        for token in tokens:
            while not (target := self._follower(state, token)) and state:
                state = self._link[state]
                length = self._length[state]
            length = min(length + 1, LIMIT) if target else 0
            state = self._holding(target, length)
        return Match(state, length)

    def followed(self, match: Match) -> Match:
        """The match itself, or the longest of its suffixes that something has followed."""
        state, length = match.state, match.length
        while state and self._token[state] < 0:
            state = self._link[state]
            length = self._length[state]
        return Match(state, length)

    def count(self, match: Match) -> int:
        """Number of times that the tokens of the match occur; the end of a text counts."""
        return self._count[match.state]

    def walk(self, match: Match, occurrences: int) -> Iterator[Step]:
        """The continuation of the match: token by token, the usual follower of the longest context.

        occurrences: how often the match is taken to occur.
        """
        state, length = match
        tokens, targets, count = self._token, self._target, self._count
        link, lengths = self._link, self._length
        while True:
            while state and tokens[state] < 0:  # as `followed`
                state = link[state]
                length, occurrences = lengths[state], count[state]
            if not state:
                return
            target = targets[state]
            yield Step(tokens[state], length, count[target], occurrences)
            state, length = target, min(length + 1, LIMIT)
            while state and lengths[link[state]] >= length:  # as `_holding`
                state = link[state]
            occurrences = count[state]

    def follow(self, match: Match, occurrences: int, length: int, threshold: float) -> list[int]:
        """Up to `length` tokens after the match, as `walk` goes.

        It ends where the path's estimated probability falls below `threshold`: the product, over its tokens, of how
        often the token followed its context divided by how often that context occurs.
        """
        path, chance = list[int](), 1.0
        for step in islice(self.walk(match, occurrences), length):
            chance *= step.followed / step.occurrences
            if chance < threshold:
                break
            path.append(step.token)
        return path

    def alternatives(self, match: Match, occurrences: int) -> Iterator[tuple[Step, Match]]:
        """All tokens that followed the match and the matches they lead to, from the longest context to the shortest.

        A context with more than SCANNED followers gives only its usual one. A step's occurrences are those of its
        context that none of the tokens before it followed. occurrences: as for `walk`.
        """
        tokens, targets, count = self._token, self._target, self._count
        (state, length), seen = match, list[int]()
        while state:
            usual, branch = tokens[state], self._branches.get(state)
            if usual >= 0 and (branch is not None or usual not in seen):
                ranked = [(usual, targets[state])]
                if branch is not None and len(branch) <= SCANNED:  # among equals the latest come first
                    ranked += sorted(reversed(branch.items()), key=lambda other: count[other[1]], reverse=True)
                occurrences -= sum(count[branch[token]] for token in seen if branch and token in branch)
                for token, target in ranked:
                    if token not in seen:
                        step, after = Step(token, length, count[target], occurrences), min(length + 1, LIMIT)
                        yield step, Match(self._holding(target, after), after)
                        seen.append(token)
                        occurrences -= count[target]
            state, occurrences = self._link[state], count[self._link[state]]
            length = self._length[state]

    def _follower(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._target[state]
        branch = self._branches.get(state)
        return branch.get(token, 0) if branch else 0

    def _holding(self, state: int, length: int) -> int:
        """The state, from `state` up its links, that holds the suffix of `length` tokens."""
        while state and self._length[self._link[state]] >= length:
            state = self._link[state]
        return state

    def _of_length(self, state: int, token: int, target: int) -> int:
        """The state of the longest string of `state` and `token`; split off `target` if that holds longer ones.

        Both halves have occurred in the same places so far, so they start with the same counts and followers.
        """
        if self._length[target] == self._length[state] + 1:
            return target
        new = len(self._length)
        same = self._link[target], self._count[target], self._token[target], self._target[target]
        self._add_state(self._length[state] + 1, *same)
        if target in self._branches:
            self._branches[new] = self._branches[target].copy()
        self._link[target] = new
        usual, targets, branches = self._token, self._target, self._branches
        while state >= 0 and (targets[state] if usual[state] == token else branches[state][token]) == target:
            if usual[state] == token:
                targets[state] = new
            if state in branches:
                branches[state][token] = new
            state = self._link[state]
        return new

    def _add_state(self, length: int, link: int, count: int, token: int, target: int) -> None:
        self._length.append(length)
        self._link.append(link)
        self._count.append(count)
        self._token.append(token)
        self._target.append(target)
