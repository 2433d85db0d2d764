"""Suffix drafts: what most often followed the longest suffix of the text that occurred before, in it or in old outputs.

The idea is that of Oliaro, Jia, Campos and Qiao, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI
Applications" (2024, arXiv:2411.04975): suffix trees of the request and of earlier outputs, drafts whose length grows
with that of the match, along the path that occurred most often. Here suffix automata take the place of the trees.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from math import exp
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary, finalize

from slipstream.checks import check_whole, expanded
from slipstream.core.interfaces import Sampler
from slipstream.core.types import Draft, Row, Traits
from slipstream.draft_length.acceptance_model import AcceptanceModel
from slipstream.drafters import Setup
from slipstream.drafters._tree_growth import UNLIKELY, Alternatives, LearnedByGroup, Node, draft_of, grown, learn
from slipstream.drafters.suffix.automaton import LIMIT, NOTHING, Match, Step, SuffixAutomaton
from slipstream.drafters.suffix.output_store import SuffixStore
from slipstream.errors import UsageError

# kinds of tokens: by the length of their context, less than 2, 3, ..., and by how far its occurrences agree (`kind_of`)
SEEN = (2, 3, 4, 6, 10, 16, 32)
# log-odds of a token by both, chosen for texts of a 135M chat model and a 1.5B code model.
# benchmarks/fit_match_kinds.py fits such numbers from runs.jsonl of `slipstream bench` or from text files, and judges
# both: on README.md and docs/*.md (11 texts, 7,987 tokens) a fit has a log-loss of 0.493 per token, these have 0.515;
# such texts are no model's outputs, so these stayed. benchmarks/policy_replay.py measures what drafts gain with them
BY_LENGTH = (-0.75, 0.04, 0.42, 0.7, 1.1, 1.5, 2.3, 3.2)
BY_AGREEMENT = (-1.7, -1.2, -0.25, 0.2, 0.3, 1.0, 2.0)
AGREED = len(BY_AGREEMENT)
RUNNER_UP = 0.11  # the share of 1,712 runners-up that came true in 80 answers of a 135M and a 0.5B chat model
OPENING = 16  # last tokens of the prompt, saved with the output so that its first words are found
SHORTEST = 1  # tokens a match must have
SHORTEST_QUOTED = 2  # the same in texts that a row may quote: a single token is no sign that it does
THRESHOLD = 0.05  # a draft ends where its probability is estimated lower
UNLIKELY_WITHOUT_COSTS = 0.2  # the same for drafts that a draft model may replace, where costs do not cut them
OUTPUTS = 1 << 17  # tokens of past outputs that are saved
ARGUMENT = re.compile(r"(?:\+(\d+))?(?:\+p=(\d+))?(?:\+outputs=(\d+))?(?:\+store=(.+))?")
TRAITS = Traits(
    samples=False,
    needs_forwards=False,
    branches=True,
    default_length=7,
    preference=1,
    in_other_engines=True,
)
Place = tuple[Match, int]  # a match, and how often it is taken to occur


def prior() -> list[float]:
    """The acceptance probability of each kind of first choice, before anything is learned."""
    return [1 / (1 + exp(-a - b)) for a in BY_LENGTH for b in BY_AGREEMENT]


def kind_of(step: Step) -> int:
    """The kind of a token: by the length of its context, and by the share of the context's occurrences it followed.

    The share: up to 0.3, 0.55, 0.8, below 1; or all of one occurrence, of two or three, of more.
    """
    share = step.followed / step.occurrences
    agreed = bisect_right((0.3, 0.55, 0.8), share) if share < 1 else 4 + bisect_right((2, 4), step.followed)
    return AGREED * bisect_right(SEEN, step.context_length) + agreed


def likely_chain(
    acceptance_model: AcceptanceModel,
    row: Row,
    steps: Iterator[Step],
    length: int,
    *,
    prob: float = 1.0,
    least: float = UNLIKELY,
) -> list[Node]:
    """Up to `length` tokens of a walk, none less likely than `least`. prob: that the tokens before are accepted."""
    nodes, chance = list[Node](), acceptance_model.chances(row)
    for step in islice(steps, length):
        kind = kind_of(step)
        prob *= chance(kind)
        if prob < least:
            break
        nodes.append(Node(len(nodes) - 1, step.token, kind, prob))
    return nodes


def candidates(automaton: SuffixAutomaton, place: Place) -> Iterator[tuple[int, int, Place]]:
    """The tokens that followed a place before: token, kind and the place it leads to."""
    for step, match in automaton.alternatives(*place):
        yield step.token, kind_of(step), (match, automaton.count(match))


class Guess(NamedTuple):
    """A draft and the position it was made for, to be compared with what the text became."""

    start: int
    nodes: list[Node]


class BestMatch(NamedTuple):
    """The match that a draft continues. occurrences: how often it occurs, the end of the text itself included."""

    automaton: SuffixAutomaton
    match: Match
    occurrences: int


@dataclass(frozen=True)
class EndedOutput:
    """A row's list of tokens; the row itself may be gone when they are stored."""

    tokens: list[int]
    prompt_length: int
    group: str = ""

    def saved(self) -> list[int]:
        """The tokens to store: the end of the prompt and the output; nothing without an output."""
        return self.tokens[max(0, self.prompt_length - OPENING) :] if len(self.tokens) > self.prompt_length else []


class RowText:
    """A row's text as far as it was read: its own automaton, and the matches of its end in others.

    The others are those of the store, and one of the texts that the row may quote.
    """

    def __init__(self, row: Row, ended: deque[EndedOutput]) -> None:
        output = EndedOutput(row.tokens, row.prompt_length, row.group)
        self.leave = finalize(row, ended.append, output)  # called when the row has finished, or is dropped
        self.leave.atexit = False
        self.own = SuffixAutomaton()
        self._quotable, self._quoted = row.quotable, SuffixAutomaton()
        self._prompt_length = row.prompt_length
        self._read = 0
        self._matches: dict[SuffixAutomaton, tuple[int, Match]] = {}  # with the size that the automaton had
        self.guess = Guess(0, [])

    def read(self, tokens: Sequence[int], stored: Sequence[SuffixAutomaton]) -> None:
        """Read the tokens that came since the last call. stored: the automata of the store."""
        new = tokens[self._read :]
        prompt = max(0, self._prompt_length - self._read)
        self._read = len(tokens)
        # in the prompt the first continuation leads, as texts are copied from their beginning on
        self.own.learn(new[:prompt], newest=False)
        self.own.learn(new[prompt:])  # in the output the latest, which may well come again
        for text in self._quotable:
            self._quoted.begin()
            self._quoted.learn(text, newest=False)
        self._quotable = ()
        before, self._matches = self._matches, {}
        for automaton in [self._quoted, *stored] if self._quoted.num_tokens else stored:
            size, match = before.get(automaton, (-1, NOTHING))
            extend = size == automaton.num_tokens and len(new) < LIMIT
            match = automaton.find(new, match) if extend else automaton.find(tokens[-LIMIT:])
            self._matches[automaton] = automaton.num_tokens, match

    def best_match(self) -> BestMatch:
        """The longest match that something has followed; on a tie the row's own, then that of newer outputs."""
        match = self.own.followed(self.own.end)
        best = BestMatch(self.own, match, self.own.count(match))  # one of the occurrences is the text's end itself
        for automaton, (_, end) in self._matches.items():
            match = automaton.followed(end)
            if automaton is self._quoted and match.length < SHORTEST_QUOTED:
                continue
            if match.length > best.match.length:
                best = BestMatch(automaton, match, automaton.count(match) + 1)
        return best


@dataclass
class SuffixDrafter:
    """Continues the longest suffix of a row's text, up to 32 tokens, that was followed by something before.

    It is looked up in the row's prompt and output, in the texts that it may quote, and in past outputs of the same
    drafter; suffixes of fewer than `shortest` tokens do not count. A draft follows the most frequent continuation (of
    equally frequent ones the latest in the output, then the first in the prompt) and ends where its estimated
    probability falls below `threshold`. Drafts are one-hot.

    An output is stored by the first call after its row has finished or was dropped. Drafts depend on stored outputs;
    the distribution of the text never does. Memory: about 150 bytes per token of unfinished rows and of saved outputs
    were measured (20 for periodic text, 280 for random ids of a vocabulary of four).
    """

    vocab_size: int
    shortest: int = SHORTEST
    threshold: float = THRESHOLD
    outputs: int = OUTPUTS  # tokens of past outputs kept per group of rows, with the ends of their prompts; 0: none
    tokenizer: str = ""  # a name that saved outputs carry
    path: Path | None = None  # the file that `save` writes by default
    # replaces the threshold: drafts are as long as they can be and have acceptance probabilities, learned from earlier
    # tokens of their kinds; every draft is compared with what the text became, verified or not
    acceptance_model: AcceptanceModel | None = None
    least: float = UNLIKELY  # with an acceptance model, a chain ends where its probability is estimated lower
    branches: int = 0  # alternatives next to each token of a tree that the user asked for; need an acceptance model
    _texts: WeakKeyDictionary[Row, RowText] = field(default_factory=WeakKeyDictionary, repr=False)
    _ended: deque[EndedOutput] = field(default_factory=deque, repr=False)

    def __post_init__(self) -> None:
        check_whole("suffix vocab_size", self.vocab_size, 1)
        if not 1 <= self.shortest <= LIMIT:
            raise UsageError(f"suffix shortest={self.shortest} (tokens of a match); allowed: 1 to {LIMIT}")
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"suffix threshold={self.threshold} (probability of a draft); allowed: 0 to 1")
        self._stores = LearnedByGroup(lambda: SuffixStore(self.vocab_size, self.outputs, self.tokenizer))
        self._store = self._stores.default  # the one that is seeded and saved

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        if self._ended or len(self._texts) > len(rows) or any(row not in self._texts for row in rows):
            self._keep_outputs()  # some may have ended: looking through all of them takes a while
        branches = self.branches if sampler.branching else 0
        drafts = [self._draft(row, n, branches) for row, n in zip(rows, lengths, strict=True)]
        return draft_of(drafts, lengths, sampler.device, has_probs=self.acceptance_model is not None)

    def extend(
        self, row: Row, tokens: Sequence[int], length: int, acceptance_prob: float
    ) -> tuple[list[int], list[float]]:
        """Up to `length` tokens after a draft by another drafter, with acceptance probabilities; see `Extender`."""
        text = self._texts.get(row)
        if text is None or self.acceptance_model is None:
            return [], []
        text.read(row.tokens, self._stores.of(row.group).automata)  # `propose` reads them only if it drafts
        match = text.own.followed(text.own.find(tokens, text.own.end))
        if match.length < self.shortest:
            return [], []
        steps = text.own.walk(match, text.own.count(match))
        nodes = likely_chain(self.acceptance_model, row, steps, length, prob=acceptance_prob)
        return [node.token for node in nodes], [node.prob for node in nodes]

    def seed(self, texts: Iterable[Sequence[int]]) -> None:
        """Store texts (lists of token ids) as if they were past outputs."""
        self._store.seed(texts)

    def save(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write the saved outputs to an .npz file: `path`, or the file the drafter was built with."""
        if path is None and self.path is None:
            raise UsageError("suffix save: no path; allowed: save(path), or a drafter built with store=FILE")
        self._keep_outputs()
        self._store.save(path or self.path or "")

    def load(self, path: str | os.PathLike[str]) -> None:
        """Store the outputs of a file as well; refuses a damaged file, and one of another vocabulary or tokenizer."""
        self._store.load(path)

    def forget(self) -> None:
        """Drop what was learned from requests, outputs above all; what was seeded and loaded stays."""
        self._keep_outputs()
        self._store.reset()
        self._stores.forget_others()
        if self.acceptance_model is not None:
            self.acceptance_model.forget()

    @property
    def num_stored_tokens(self) -> int:
        """Tokens of past outputs that `save` would write now: those of the default group."""
        self._keep_outputs()
        return self._store.num_tokens

    def _draft(self, row: Row, length: int, branches: int) -> list[Node]:
        text = self._texts.get(row)
        if text is None:
            text = self._texts[row] = RowText(row, self._ended)
        if not length:
            return []
        text.read(row.tokens, self._stores.of(row.group).automata)
        best = text.best_match()
        if self.acceptance_model is None:
            if best.match.length < self.shortest:
                return []
            tokens = best.automaton.follow(best.match, best.occurrences, length, self.threshold)
            return [Node(index - 1, token, 0, 1.0) for index, token in enumerate(tokens)]
        learn(self.acceptance_model, row, *text.guess)
        nodes = list[Node]()
        if best.match.length >= self.shortest:
            nodes = self._likely(self.acceptance_model, row, best, length, branches)
        text.guess = Guess(len(row.tokens), nodes)
        return nodes

    def _likely(
        self, acceptance_model: AcceptanceModel, row: Row, best: BestMatch, length: int, branches: int
    ) -> list[Node]:
        automaton, match = best.automaton, best.match
        occurrences = best.occurrences - 1  # the match also ends the text itself, where nothing has followed it yet
        if not branches:
            return likely_chain(acceptance_model, row, automaton.walk(match, occurrences), length, least=self.least)
        kinds = len(BY_LENGTH) * AGREED
        likely = Alternatives(cache(acceptance_model.chances(row)), 1 + branches, kinds, ranks=2)
        return grown(
            lambda place, prob: likely.followers(candidates(automaton, place), prob),
            (match, occurrences),
            length,
            deepest=-(-length // (1 + branches)),
        )

    def _keep_outputs(self) -> None:
        """Move the outputs of rows that have ended to the store."""
        for row in [row for row in self._texts if row.finish_reason is not None]:
            self._texts.pop(row).leave()
        while self._ended:
            ended = self._ended.popleft()
            self._stores.of(ended.group).add(ended.saved())


def build(setup: Setup, argument: str, before: str = "suffix:") -> SuffixDrafter:
    """ "suffix", "suffix:MIN"; p=PERCENT, outputs=TOKENS and store=FILE may follow in this order, joined by "+".

    The file is only read here; `SuffixDrafter.save` writes it. before: what the user wrote before the argument.
    """
    match = ARGUMENT.fullmatch(f"+{argument}" if argument else "")
    if match is None:
        raise UsageError(
            f"drafter='{before}{argument}'; allowed: suffix, suffix:MIN, and p=PERCENT, outputs=TOKENS, store=FILE "
            "in this order, joined by +"
        )
    shortest, percent, outputs, file = match.groups()
    if percent is not None and int(percent) > 100:
        raise UsageError(f"drafter='{before}{argument}': p={percent}; allowed: p=0 to p=100")
    if percent is not None and setup.fixed_tree:
        raise UsageError(f"drafter='{before}{argument}' with a tree; allowed: arguments other than p=PERCENT")
    path = expanded(file) if file else None
    kinds = [*prior(), *(RUNNER_UP for _ in prior())]
    uses_model = percent is None and (setup.acceptance_probs or setup.fixed_tree)
    drafter = SuffixDrafter(
        setup.vocab_size,
        SHORTEST if shortest is None else int(shortest),
        THRESHOLD if percent is None else int(percent) / 100,
        OUTPUTS if outputs is None else int(outputs),
        path=path,
        acceptance_model=AcceptanceModel(kinds, shared=False) if uses_model else None,
        least=UNLIKELY_WITHOUT_COSTS if uses_model and setup.planner is None and not setup.fixed_tree else UNLIKELY,
        branches=setup.siblings if setup.fixed_tree else 0,  # alternatives to a match save less than finding them costs
    )
    if path is not None:
        if not drafter.outputs:
            raise UsageError(f"drafter='{before}{argument}': outputs=0 keeps nothing; allowed: outputs above 0")
        if not path.is_file():
            raise UsageError(
                f"drafter='{before}{argument}': {str(path)!r} is not a file; allowed: a file that "
                "SuffixDrafter.save(FILE) wrote"
            )
        drafter.load(path)
    return drafter
