"""Compiles a grammar in a process of its own first: one that takes too much time or memory ends that process alone.

llguidance cannot be interrupted, and a schema of a hundred characters can keep it busy for hours. Small grammars
without the few constructs that can do so are compiled here at once.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from slipstream.constraints.grammar_text import (
    LIMITS,
    MEGABYTES,
    SECONDS,
    TIMED_OUT,
    allowed,
    in_lark,
    load_llguidance,
    reason,
)
from slipstream.errors import SlipstreamError, UsageError

WALL_SECONDS = 20  # until a trial is ended on a busy machine, or on one that cannot limit a process's processor time
HEAVY_MEGABYTES = 8  # memory that a trial may keep before its process is replaced, so that sizes stay true
SAVED_TRIALS = 1024
SMALL = 4000  # characters of a grammar that is compiled at once
# what multiplies in llguidance: counted repetitions, intersections, complements, divisibility
MULTIPLIES = {
    "json_schema": re.compile(r'"(?:pattern|patternProperties|multipleOf|allOf|propertyNames|dependentSchemas)"'),
    "json_object": re.compile(r"(?!)"),
    "choice": re.compile(r"(?!)"),
    "regex": re.compile(r"[{&~]"),
    "grammar": re.compile(r"[{}&~%@]|\d{3}"),
}


@dataclass(frozen=True)
class Trial:
    """The outcome of compiling a grammar."""

    problem: str  # llguidance's message if it is refused, else empty
    megabytes: int = 0  # that it takes


def check_grammar(kind: str, grammar: str, expression: str) -> Trial:
    """Raise UsageError for a grammar that llguidance cannot read, or not within the limits.

    kind: of the constraint; expression: the regular expression, or else the grammar, which tells whether it is small.
    """
    if is_small(kind, expression):
        limits = LIMITS.parser_limits(LIMITS.lexer_cost)
        is_wrong, messages = load_llguidance().LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
        trial = Trial(messages[0] if is_wrong else "")
    else:
        load_llguidance()
        # text in place of special tokens, which a vocabulary of bytes does not have
        trial = _trials().of(in_lark(grammar, lambda name: "/x/"))
    if trial.problem:
        raise UsageError(f"constraint: {kind}: {reason(trial.problem)}; allowed: {allowed(trial.problem, kind)}")
    return trial


def is_small(kind: str, expression: str) -> bool:
    """True if a grammar is compiled in milliseconds for certain."""
    return len(expression) <= SMALL and not MULTIPLIES[kind].search(expression)


@dataclass
class GrammarTrials:
    """Asks a process of its own about one grammar after the other, and remembers the answers. Threads take turns."""

    _saved: OrderedDict[bytes, Trial] = field(default_factory=OrderedDict)
    _turn: Lock = field(default_factory=Lock)
    _process: subprocess.Popen[str] | None = None
    _owner: int = 0  # the process that started it; one made by a fork starts its own

    def of(self, grammar: str) -> Trial:
        key = hashlib.sha256(grammar.encode()).digest()
        with self._turn:
            if key not in self._saved:
                self._saved[key] = self._ask(grammar)
            self._saved.move_to_end(key)
            while len(self._saved) > SAVED_TRIALS:
                self._saved.popitem(last=False)
            return self._saved[key]

    def close(self) -> None:
        """End the process; the next question starts another."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()

    def _ask(self, grammar: str) -> Trial:
        if self._process is None or self._owner != os.getpid():
            self._process, self._owner = _start_process(), os.getpid()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        limit = Timer(WALL_SECONDS, process.kill)
        limit.start()
        try:
            process.stdin.write(json.dumps(grammar) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            limit.cancel()
        if not line:
            self.close()
            return Trial(TIMED_OUT)
        answer = json.loads(line)
        if answer["megabytes"] > HEAVY_MEGABYTES:
            self.close()
        return Trial(answer["problem"], answer["megabytes"])


@cache
def _trials() -> GrammarTrials:
    trials = GrammarTrials()
    atexit.register(trials.close)
    return trials


def _start_process() -> subprocess.Popen[str]:
    """A process that runs `serve`; it needs no PyTorch and starts in a tenth of a second."""
    if not sys.executable:
        raise SlipstreamError(
            "constraint: cannot be tried in a process of its own, as sys.executable is empty; allowed: smaller ones"
        )
    folder = str(Path(__file__).parents[2])
    code = f"import sys; sys.path[:] = {[folder, *sys.path]!r}; import {__name__} as trial; trial.serve()"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
    )


def serve() -> None:
    """Answer one line per grammar until there are no more. Runs in the process that may end at any time."""
    library, limit, tokenizer = load_llguidance(), _limits(), byte_tokenizer()
    for line in sys.stdin:
        limit()
        before = _megabytes()
        limits = LIMITS.parser_limits(LIMITS.lexer_cost)
        matcher = library.LLMatcher(tokenizer, json.loads(line), log_level=0, limits=limits)
        problem = matcher.get_error() or _walked(matcher.deep_copy())
        answer = {"problem": problem, "megabytes": max(0, _megabytes() - before)}
        del matcher
        print(json.dumps(answer), flush=True)


def _walked(matcher: Any) -> str:
    """llguidance's message if a grammar's first token exceeds a limit. Follows a random text, to show its memory."""
    matcher.try_consume_tokens(matcher.compute_ff_tokens())
    draw = random.Random(0)
    for step in range(32):
        mask = matcher.compute_bitmask()
        legal = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        is_consumed = legal and matcher.try_consume_tokens([draw.choice(legal)])
        if step == 0 and matcher.is_error():
            return str(matcher.get_error())
        if not is_consumed or matcher.is_stopped():
            break
    return ""


def byte_tokenizer() -> Any:
    """llguidance's form of a vocabulary of the 256 bytes and an end, token 256."""
    library = load_llguidance()
    return library.LLTokenizer(library.TokenizerWrapper(_Bytes()), n_vocab=257, eos_token=[256])


class _Bytes:
    tokens, special_token_ids = [*(bytes([byte]) for byte in range(256)), b"<end>"], [256]
    bos_token_id, eos_token_id = None, 256

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _limits() -> Callable[[], None]:
    """Limit this process's memory; the result limits, at each call, its processor time until the next call."""
    try:
        import resource
    except ImportError:  # Windows: the process that asks ends this one after WALL_SECONDS
        return lambda: None
    status = Path("/proc/self/statm")
    if status.exists():
        size = int(status.read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (MEGABYTES << 20), resource.RLIM_INFINITY))

    def limit() -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(usage.ru_utime + usage.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (spent + SECONDS + 1, resource.RLIM_INFINITY))

    return limit


def _megabytes() -> int:
    """The memory that this process has now; 0 if the system does not report it."""
    status = Path("/proc/self/statm")
    if not status.exists():
        return 0
    return int(status.read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
