r"""Grammars compiled for one model's vocabulary by llguidance, and a row's way through one.

A mask is a function of the grammar and the tokens alone, and allows a single token wherever the grammar forces one:
llguidance picks the tokens into which its tokenizer would cut the forced text.

The rows of a grammar share its lexer, which llguidance builds as it reads outputs. At a limit it stops for good, and no
row that shares it can go on; `(\w{1,20} ?){1,25}` reaches the limit within ten random tokens. So that no output depends
on lexer state left by other rows or by rejected drafts, a row fails exactly where it would if decoded alone without
drafts, with a lexer of its own: `_OwnLexer`. Rows leave a shared lexer when half of its limit is used, before it can
hide or cause a failure.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from threading import Lock
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from slipstream.constraints.constraint import Constraint
from slipstream.constraints.grammar_text import LIMITS, TOO_EXPENSIVE, Limits, allowed, in_lark, load_llguidance, reason
from slipstream.core.kv_slots import common_beginning
from slipstream.core.types import Row
from slipstream.errors import UsageError
from slipstream.tokenization.byte_vocabulary import ByteVocabulary, NamedModel, byte_vocabulary

SAVED, SAVED_MEGABYTES = 32, 512  # grammars that stay compiled: how many, and what they take together
LEXER_COST = re.compile(r'"lexer_cost": (\d+)')
Bits = NDArray[np.uint8]


class _Vocabulary:
    """The model's tokens, in the form that llguidance asks for."""

    bos_token_id = None

    def __init__(self, vocabulary: ByteVocabulary) -> None:
        names = {number: name for name, number in vocabulary.special.items()}
        self.tokens = [text or names.get(number, "").encode() for number, text in enumerate(vocabulary.texts)]
        self.special_token_ids = sorted(names)
        self.eos_token_id = vocabulary.end_ids[0]
        self._vocabulary, self._turn = vocabulary, Lock()

    def __call__(self, text: bytes | str) -> list[int]:
        with self._turn:  # tokenizers cannot be shared by threads
            return self._vocabulary.encode(text if isinstance(text, str) else text.decode()).ids


class CompiledGrammar:
    """A grammar with a lexer that several rows use."""

    def __init__(self, grammar: str, new_matcher: Callable[[int], Any], limits: Limits) -> None:
        self.grammar, self.new_matcher, self.limits = grammar, new_matcher, limits
        self.matcher = new_matcher(limits.step_cost)
        self.is_worn = False  # a row had to leave this lexer: start new rows on a fresh one
        self.is_spent = lexer_cost(self.matcher) > limits.lexer_cost // 2  # near its limit: move every row off it
        self._unchecked = 0  # masks since the lexer's cost was read

    def masks_asked(self, matcher: Any, count: int) -> None:
        """Note that this many masks were computed, and check the lexer's cost before it can be too high."""
        self._unchecked += count
        # fewer masks cannot use up half of what a row may use of the lexer
        if self._unchecked > self.limits.lexer_cost // (2 * self.limits.step_cost):
            self._unchecked = 0
            self.is_spent = self.is_spent or lexer_cost(matcher) > self.limits.lexer_cost // 2


def lexer_cost(matcher: Any) -> int:
    """The cost of a matcher's lexer so far; llguidance reports it only with an error, so a copy is made to fail."""
    copy = matcher.deep_copy()
    copy.consume_token(1 << 31)
    cost = LEXER_COST.search(copy.get_error())
    return int(cost[1]) if cost else 0


@dataclass
class CompiledGrammars:
    """The compiled grammars of one model. llguidance gets the model's vocabulary when the first constraint needs it.

    That takes a second for 150,000 tokens; a grammar takes milliseconds, and the last `SAVED` stay compiled. Threads
    may share it.
    """

    model: NamedModel
    vocab_size: int
    limits: Limits = LIMITS
    _saved: OrderedDict[str, tuple[CompiledGrammar, int]] = field(default_factory=OrderedDict, repr=False)
    _turn: Lock = field(default_factory=Lock, repr=False, compare=False)

    def constraint(self, constraint: Constraint, end_ids: frozenset[int]) -> GrammarState:
        """A row's own way through a grammar. end_ids: the tokens that end the row."""
        return GrammarState(self._compiled(constraint), self.vocab_size, self._end_ids, end_ids)

    def _compiled(self, constraint: Constraint) -> CompiledGrammar:
        """A compiled grammar; UsageError if the beginning of its texts exceeds llguidance's limits already."""
        with self._turn:
            tokenizer = self._tokenizer
            saved = self._saved.get(constraint.text)
            if saved is not None and not saved[0].is_worn:
                self._saved.move_to_end(constraint.text)
                return saved[0]

        grammar = in_lark(constraint.text, self._named)

        def new_matcher(step_cost: int) -> Any:
            limits = self.limits.parser_limits(step_cost)
            return load_llguidance().LLMatcher(tokenizer, grammar, log_level=0, limits=limits)

        # outside the lock, so that other threads need not wait
        compiled = CompiledGrammar(constraint.text, new_matcher, self.limits)
        if problem := _first_problem(new_matcher, compiled.matcher, self.limits):
            raise UsageError(f"constraint: {reason(problem)}; allowed: {allowed(problem)}")
        with self._turn:
            self._saved[constraint.text] = compiled, constraint.megabytes
            self._saved.move_to_end(constraint.text)
            while len(self._saved) > SAVED or sum(size for _, size in self._saved.values()) > SAVED_MEGABYTES:
                self._saved.popitem(last=False)
        return compiled

    def _named(self, token: str) -> str:
        """An added token in a grammar: as text if it stands for text, as <tool_call> does in some vocabularies."""
        return json.dumps(token, ensure_ascii=False) if token.encode() in self._vocabulary.ids else token

    @cached_property
    def _vocabulary(self) -> ByteVocabulary:
        return byte_vocabulary(self.model, self.vocab_size)

    @property
    def _end_ids(self) -> tuple[int, ...]:
        return tuple(number for number in self.model.end_ids if number < self.vocab_size)

    @cached_property
    def _tokenizer(self) -> Any:
        if not self._end_ids:
            raise UsageError(
                f"constraint: model {self.model.name!r} has no end token, so that a text could not end with the "
                "grammar; allowed: models that have one"
            )
        library = load_llguidance()
        try:
            wrapper = library.TokenizerWrapper(_Vocabulary(self._vocabulary))
        except UsageError as error:
            raise UsageError(
                f"constraint: model {self.model.name!r}: {error}; allowed: models whose tokens can be read as bytes"
            ) from None
        return library.LLTokenizer(wrapper, n_vocab=self.vocab_size, eos_token=list(self._end_ids))


def _first_problem(new_matcher: Callable[[int], Any], compiled: Any, limits: Limits) -> str:
    """The reason that no output of a grammar can begin: llguidance's message, or nothing."""
    trial = compiled.deep_copy()
    for _ in range(2):
        trial.compute_bitmask()
        trial.try_consume_tokens(trial.compute_ff_tokens())
        mask = np.unpackbits(np.frombuffer(trial.compute_bitmask(), dtype=np.uint8), bitorder="little")
        trial.try_consume_tokens([int(mask.argmax())])  # too many alternatives show only after a token
        problem = str(trial.get_error())
        if not problem.startswith("lexer error"):
            break
        trial = new_matcher(limits.lexer_cost)  # a row's own lexer may take longer than one that others wait for
    return problem


class GrammarState:
    """One row's way through a grammar; see `RowConstraint`. It remembers where it stands, for speed only.

    model_ends: the model's end tokens; row_ends: all that end this row. Those that are not the model's are allowed
    wherever the model's are.
    """

    def __init__(
        self, compiled: CompiledGrammar, vocab_size: int, model_ends: Sequence[int], row_ends: frozenset[int]
    ) -> None:
        self._compiled, self._matcher, self._consumed = compiled, compiled.matcher.deep_copy(), list[int]()
        self._words = -(-vocab_size // 32)
        self._end, self._model_ends, self._ends = model_ends[0], frozenset(model_ends), row_ends
        self._over = False  # an end follows what was consumed
        self._further = np.array(sorted(row_ends.difference(model_ends)), dtype=np.int64)
        self._alone: _OwnLexer | None = None  # once the shared lexer can no longer be relied on

    def masks(self, output: Sequence[int], draft: Sequence[int]) -> Bits:
        masks = None if self._alone else self._shared_masks(output, draft)
        if masks is None:
            masks = self._masks_alone(output, draft)
        if len(self._further):
            ends = (masks[:, self._end // 8] >> (self._end % 8)) & 1
            rows = ends.nonzero()[0][:, None]
            np.bitwise_or.at(masks, (rows, self._further // 8), (1 << (self._further % 8)).astype(np.uint8))
        return masks

    def num_legal(self, output: Sequence[int], draft: Sequence[int]) -> int:
        # a lexer of the row's own takes no drafts, which would fill it up
        return 0 if self._alone else max(0, self._reach([*output, *draft]) - len(output))

    def forced(self, output: Sequence[int], limit: int) -> list[int]:
        run = list[int]()
        while (
            not self._alone
            and len(run) < limit
            and self._reach([*output, *run]) == len(output) + len(run)
            and not self._over
        ):
            if self._matcher.is_stopped():
                # with several end tokens none of them is forced
                run += [self._end] if len(self._ends) == 1 and self._matcher.is_accepting() else []
                break
            more = self._matcher.compute_ff_tokens()
            if not more:
                break
            run += more
        return run[:limit]

    def problem(self, output: Sequence[int]) -> str | None:
        if self._alone is None and self._shared_masks(output, ()) is None:
            self._leave()
        if self._alone:
            return self._alone.problem(output)
        reached = self._reach(output)
        illegal = not self._over and reached < len(output)
        return f"token {output[reached]} of the text is not one that the constraint allows" if illegal else None

    def _shared_masks(self, output: Sequence[int], draft: Sequence[int]) -> Bits | None:
        """Masks by the lexer that all rows share; None where they cannot be relied on."""
        reached = self._reach(output)
        if self._over:
            return self._filled(1 + len(draft), 255)
        if reached < len(output):
            self._matcher.compute_bitmask()  # a lexer that has stopped refuses every token, and says so only here
            return None if self._matcher.is_error() else self._filled(1 + len(draft), 0)
        masks, size = self._filled(1 + len(draft), 255), 4 * self._words
        if draft:
            question = [(self._matcher, 0, list(draft))]
            _executor().unsafe_compute_mask_ptr_with_draft_token(question, masks.ctypes.data, size, len(masks))
        else:
            self._matcher.unsafe_compute_mask_ptr(masks.ctypes.data, size)
        self._compiled.masks_asked(self._matcher, len(masks))
        if self._matcher.is_error() or self._compiled.is_spent or self._stops_early(masks, draft):
            return None
        return masks

    def _stops_early(self, masks: Bits, draft: Sequence[int]) -> bool:
        """True if a draft token was refused that its mask allows: the lexer has stopped."""
        for count, token in enumerate(draft):
            if token in self._model_ends or not masks[count, token // 8] >> (token % 8) & 1:
                return False
            if (masks[count + 1] == 255).all():
                return True
        return False

    def _masks_alone(self, output: Sequence[int], draft: Sequence[int]) -> Bits:
        """Masks by a lexer of the row's own, computed one after the other."""
        alone = self._alone or self._leave()
        masks = self._filled(1 + len(draft), 255)
        for count in range(1 + len(draft)):
            mask = alone.mask([*output, *draft[:count]])
            if mask is None:  # an end, or a token that is not allowed, comes before this place
                masks[count] = 0 if not count and alone.problem(output) else 255
                break
            masks[count] = mask[: masks.shape[1]]
        return masks

    def _leave(self) -> _OwnLexer:
        """Go on with a lexer of the row's own."""
        self._compiled.is_worn = True
        self._alone = _OwnLexer(self._compiled, self._model_ends, self._ends)
        return self._alone

    def _filled(self, count: int, value: int) -> Bits:
        return np.full((count, 4 * self._words), value, dtype=np.uint8)

    def _reach(self, tokens: Sequence[int]) -> int:
        """Make the matcher consume exactly these tokens, as far as they are allowed; an end is never consumed.

        Returns how many of them are allowed, an end included.
        """
        same = common_beginning(self._consumed, tokens, min(len(self._consumed), len(tokens)))
        if same < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - same)
        end = next((i for i in range(same, len(tokens)) if tokens[i] in self._model_ends), len(tokens))
        num_consumed = self._matcher.try_consume_tokens(list(tokens[same:end])) if same < end else 0
        reached = same + num_consumed
        self._consumed = list(tokens[:reached])
        self._over = reached < len(tokens) and tokens[reached] in self._ends and bool(self._matcher.is_accepting())
        return reached + self._over


class _OwnLexer:
    """A row's way through a grammar with a lexer that no other row uses, mask by mask as plain decoding goes.

    It fails where the output has made the lexer, or a step, too expensive. If other tokens, such as rejected drafts,
    have added to the cost, it starts over with a fresh lexer.
    """

    def __init__(self, compiled: CompiledGrammar, model_ends: frozenset[int], row_ends: frozenset[int]) -> None:
        self._compiled, self._model_ends, self._ends = compiled, model_ends, row_ends
        self._illegal_at = -1  # where the tokens of the last question leave the grammar
        self._begin()

    def mask(self, tokens: Sequence[int]) -> Bits | None:
        """The tokens that may follow these: none if the row fails; None if an end or an illegal token is among them."""
        while True:
            mask = self._walked(tokens)
            if not self._failure or not self._has_strayed:
                return mask
            self._begin()

    def problem(self, tokens: Sequence[int]) -> str | None:
        """The reason that nothing may follow these tokens, if it is the constraint; else None."""
        mask = self.mask(tokens)
        if self._failure:
            return self._failure
        if mask is None and self._illegal_at >= 0:
            return f"token {tokens[self._illegal_at]} of the text is not one that the constraint allows"
        return None

    def _begin(self) -> None:
        self._matcher = self._compiled.new_matcher(self._compiled.limits.lexer_cost)
        self._consumed, self._has_strayed, self._failure = list[int](), False, ""
        self._last = self._next_mask()

    def _walked(self, tokens: Sequence[int]) -> Bits | None:
        same = common_beginning(self._consumed, tokens, min(len(self._consumed), len(tokens)))
        if same < len(self._consumed):
            self._has_strayed = True
            if self._failure or not self._matcher.rollback(len(self._consumed) - same):
                self._begin()
                same = 0
            else:
                del self._consumed[same:]
                self._last = self._next_mask()
        self._illegal_at = -1
        for position, token in enumerate(tokens[same:], same):
            if self._failure:
                return None
            if token in self._model_ends:
                is_over = token in self._ends and bool(self._matcher.is_accepting())
                self._illegal_at = -1 if is_over else position
                return None
            is_allowed = bool(self._last[token // 8] >> (token % 8) & 1)
            is_taken = bool(self._matcher.try_consume_tokens([token]))
            if not is_taken and not is_allowed and not self._matcher.is_error():
                self._illegal_at = position
                return None
            self._consumed.append(token)
            self._last = self._next_mask(has_failed=not is_taken)
        return self._last

    def _next_mask(self, *, has_failed: bool = False) -> Bits:
        """The tokens that may follow those consumed; if a limit is exceeded, notes the failure and allows none."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8).copy()
        if self._matcher.is_error():
            self._failure = f"the constraint cannot go on: {reason(self._matcher.get_error())}"
        elif has_failed or lexer_cost(self._matcher) > self._compiled.limits.lexer_cost:
            self._failure = f"the constraint cannot go on: {TOO_EXPENSIVE}"
        return np.zeros_like(bits) if self._failure else bits


@cache
def _executor() -> Any:
    """Computes the masks of drafts; in one thread, as forwards use the others."""
    return load_llguidance().LLExecutor(1)


class RowConstraint(Protocol):
    """Says which tokens may follow; the answer depends on nothing but the tokens in the question.

    output: tokens after the prompt; draft: tokens after these. V: the target's vocabulary.
    """

    def masks(self, output: Sequence[int], draft: Sequence[int]) -> NDArray[np.uint8]:
        """[len(draft) + 1, at least V / 8] bits, lowest first: tokens that may follow the output and each draft token.

        After a token that is not allowed, or the end, all bits are set.
        """

    def num_legal(self, output: Sequence[int], draft: Sequence[int]) -> int:
        """Number of draft tokens that may follow the output, up to the first that may not."""

    def forced(self, output: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens that must follow, each being the only one its mask allows; the end may be the last."""

    def problem(self, output: Sequence[int]) -> str | None:
        """The reason that nothing may follow an output, if it is the constraint itself; else None."""


def constraint_of(row: Row) -> RowConstraint | None:
    """The row's constraint, if it has one; to the loop it is just an object."""
    return cast("RowConstraint | None", row.constraint)
