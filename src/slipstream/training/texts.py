"""The texts that a head learns from: made by the target, kept in a file line by line.

The target invents a question after the beginning of a user's turn, mostly from a given opening, and answers it (Magpie,
Xu et al. 2024, arXiv:2406.08464). Or it answers the prompts of a file; texts of a file are read as they are. Text
number n depends on the seed and n alone, so a run that was killed goes on with the text that it would have made next.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

from slipstream.checks import why_unreadable
from slipstream.core.kv_slots import common_beginning
from slipstream.core.rng import key
from slipstream.core.types import Row
from slipstream.decoder import SpeculativeDecoder
from slipstream.durable_files import append, cut, size_of_whole_lines
from slipstream.errors import SlipstreamError, UsageError, first_line
from slipstream.jobs.job_lines import FileLines, is_openai
from slipstream.sampling.params import SamplingParams
from slipstream.tokenization.tokenizer import Tokenizer, TokenizerDetails

FILE = "texts.jsonl"
QUESTION, ANSWER = 96, 400  # tokens at most
SHORTEST = 8  # tokens of an answer that is kept
LONGEST = 2048  # tokens of a text that are kept
TEMPERATURES = (0.0, 0.5, 0.8, 1.0)  # of answers, in turn
OPENED = 0.7  # share of the invented questions that begin with an opening
FIRST_BATCH, BATCH = 8, 32  # texts made at a time, at first and later
PROBES = "Qx", "7y"  # two messages that differ in their first and in their last character
OPENINGS = """\
Write a short story about|Compose a poem about|Compose an engaging travel blog post about|Draft a professional email
Describe a character who|Write a persuasive essay|Pretend to be a|Imagine yourself as|You are an expert in|Act as a
Assume the role of|As a historian, tell|What is|What are the|How does|How do|Why is|Explain|Explain in simple terms
In the field of biology|Describe the process of|What happens when|Discuss the|Compare and contrast|Analyze
Provide insights into|Summarize the following article:|Translate the following sentence into|Fix the grammar of
Give me a list of|Suggest|Recommend|Plan a|Can you help me|I want to|Which is better|When did|Where is
Write a Python function that|Write an SQL query|Solve|Calculate|A train|John has|Extract|Classify
Given the following text|Tell me about|Discuss the importance of|Define|Outline|Design|Write a speech|Brainstorm|Hello
What do you think about|Who invented|What is the difference between|How many|Critique|Reflect on""".replace(
    "\n", "|"
).split("|")

INVENTING, ANSWERING = "inventing prompts", "answering prompts"


# takes what is being made, the tokens of all texts with unfinished ones, and seconds as in `MadeText`
ShowTexts = Callable[[str, int, float], None]
ShowRound = Callable[[str, int], None]  # takes what is being made, and the tokens of unfinished texts
IsOver = Callable[[], bool]  # whether the time for making texts has passed


@dataclass(frozen=True)
class MadeText:
    """A text. start: index of the first token that is learned; greedy: whether each token from there on is likeliest.

    seconds: from the beginning of the first text to the end of this one, without the time between two runs.
    """

    number: int
    ids: list[int]
    start: int
    greedy: bool
    seconds: float


@dataclass(frozen=True)
class Source:
    """A prompt to answer, or a text to read as it is. where: its file and line, for messages."""

    where: str
    prompt: Any = None
    text: str = ""
    chat: bool = True


def read_sources(path: Path) -> list[Source]:
    """The prompts or texts of a file: one prompt per line; of .jsonl lines with "prompt" or "text", or OpenAI's."""
    if path.suffix != ".jsonl":
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--prompts {str(path)!r} cannot be read: {why_unreadable(error)}") from error
        sources = [Source(f"{path}, line {i}", line.strip()) for i, line in enumerate(lines, 1) if line.strip()]
    else:
        sources = [_source(f"{path}, line {line.number}", line.error, line.item) for line in FileLines(path)]
    if not sources:
        raise UsageError(f"--prompts {str(path)!r} holds no prompts; allowed: at least one line")
    return sources


def _source(where: str, error: str, item: Mapping[str, Any]) -> Source:
    if error:
        raise UsageError(f"{where}: {error}")
    body = item.get("body")
    if is_openai(item) and isinstance(body, Mapping):
        return Source(where, body.get("messages") or body.get("prompt"))
    text, chat = item.get("text"), item.get("chat", True)
    if isinstance(text, str) and text.strip() and "prompt" not in item:
        return Source(where, text=text)
    if "prompt" not in item or not isinstance(chat, bool):
        raise UsageError(f'{where}: no prompt; allowed: {{"prompt": text, ids or messages}} or {{"text": text}}')
    return Source(where, item["prompt"], chat=chat)


class TextMaker:
    """Makes texts for one target.

    sources: prompts, answered over and over, and texts, read once; if empty, the target invents the prompts.
    """

    def __init__(self, decoder: SpeculativeDecoder, sources: Sequence[Source], seed: int) -> None:
        self._decoder, self._sources, self._seed = decoder, sources, seed
        self._room = decoder.target.backend.max_length
        self._prefix, self._ends = ([], ()) if sources else user_turn(decoder)
        self.begins_with = ANSWERING if sources else INVENTING
        self._only_texts = bool(sources) and all(source.prompt is None for source in sources)
        for source in sources:  # before anything is generated
            self._check(source)

    def make(
        self, first: int, count: int, show: ShowRound = lambda *_: None, is_over: IsOver = lambda: False
    ) -> Iterator[tuple[int, list[int], int, bool]]:
        """Number, ids, start and greediness of texts number `first` to `first + count - 1`; short ones are left out.

        A text is yielded once it and those before it have ended; a caller that stops asking ends the work. When
        `is_over`, answers end where they are.
        """
        numbers = [n for n in range(first, first + count) if not self.is_exhausted(n)]
        prompts = self._prompts(numbers, show, is_over)
        rows, texts = dict[int, Row](), dict[int, list[int]]()
        for n in numbers:
            source = self._sources[n % len(self._sources)] if self._sources else None
            if source is not None and source.prompt is None:
                if n < len(self._sources):  # a text that is read twice teaches nothing new
                    texts[n] = self._decoder.encode(source.text)
            elif n in prompts:
                rows[n] = self._row(prompts[n], self._temperature(n), n, source is None or source.chat)
        ended = self._ended(ANSWERING, list(rows.values()), show, is_over)
        for n in sorted({*rows, *texts}):
            if n in texts:
                ids, start, greedy = texts[n], 1, False
            else:
                row = next(ended)
                if row.error is not None:
                    raise SlipstreamError(f"text {n} failed: {first_line(row.error)}") from row.error
                ids, start, greedy = row.tokens, row.prompt_length, self._temperature(n) == 0
            if min(len(ids), LONGEST) - start >= SHORTEST:
                yield n, ids[:LONGEST], start, greedy

    def is_exhausted(self, number: int) -> bool:
        """Whether no text can be made from this number on."""
        return self._only_texts and number >= len(self._sources)

    def _ended(self, doing: str, rows: Sequence[Row], show: ShowRound, is_over: IsOver) -> Iterator[Row]:
        """These rows in their order, each once it and those before it have ended; all as they are when `is_over`."""
        unfinished = sum(len(row.tokens) for row in rows)
        with closing(self._decoder.run(rows)) as rounds:
            for row in rows:
                while row.finish_reason is None and not is_over() and (newest := next(rounds, None)) is not None:
                    unfinished += len(newest.tokens)
                    show(doing, unfinished)
                unfinished -= len(row.tokens)
                yield row

    def _prompts(self, numbers: Sequence[int], show: ShowRound, is_over: IsOver) -> dict[int, Any]:
        """The prompt of each text, by number; none for texts whose prompt the target left empty."""
        if self._sources:
            return {n: self._sources[n % len(self._sources)].prompt for n in numbers}
        openings = {n: self._opening(n) for n in numbers}
        params = [
            SamplingParams(
                temperature=1.0,
                max_tokens=QUESTION,
                seed=key(self._seed, n, 0) >> 1,
                stop_token_ids=self._ends,
            )
            for n in numbers
        ]
        rows = self._decoder.rows([self._prefix + openings[n] for n in numbers], params)
        questions = {
            n: self._decoder.decode(row.tokens[len(self._prefix) :]).strip()
            for n, row in zip(numbers, self._ended(INVENTING, rows, show, is_over), strict=True)
            if row.error is None and row.finish_reason is not None
        }
        return {n: question for n, question in questions.items() if question}

    def _opening(self, number: int) -> list[int]:
        dice, tokenizer = Random(f"{self._seed} {number}"), self._decoder.tokenizer
        assert tokenizer is not None
        return tokenizer.bare(dice.choice(OPENINGS)) if dice.random() < OPENED else []

    def _temperature(self, number: int) -> float:
        """The temperature of an answer; a prompt that comes again has the next one."""
        turn = sum(divmod(number, len(self._sources))) if self._sources else number
        return TEMPERATURES[turn % len(TEMPERATURES)]

    def _row(self, prompt: Any, temperature: float, number: int, chat: bool) -> Any:
        row = self._decoder.rows([prompt], SamplingParams(max_tokens=1), chat=chat)[0]
        params = SamplingParams(
            temperature=temperature,
            max_tokens=min(ANSWER, self._room - row.prompt_length),
            seed=key(self._seed, number, 1) >> 1,
        )
        return self._decoder.rows([row.tokens], params)[0]

    def _check(self, source: Source) -> None:
        try:
            if source.prompt is None:
                self._decoder.encode(source.text)
            else:
                self._decoder.rows([source.prompt], SamplingParams(max_tokens=1), chat=source.chat)
        except UsageError as error:
            raise UsageError(f"{source.where}: {error}") from error


def refuse_without_template(tokenizer: Tokenizer | None, name: str) -> None:
    """Refuse to invent prompts for a target without a chat template."""
    if tokenizer is None or not tokenizer.has_chat_template:
        raise UsageError(f"target {name!r} has no chat template, so it cannot invent prompts; allowed: --prompts FILE")


def user_turn(decoder: SpeculativeDecoder) -> tuple[list[int], tuple[int, ...]]:
    """The tokens before a user's words in the chat template, and the control token after them, if there is one."""
    tokenizer = decoder.tokenizer
    refuse_without_template(tokenizer, decoder.target.name)
    assert tokenizer is not None
    first, second = (tokenizer.chat([{"role": "user", "content": content}]) for content in PROBES)
    shorter = min(len(first), len(second))
    before = common_beginning(first, second, shorter)
    after = common_beginning(first[::-1], second[::-1], shorter)
    if not before or before + after >= len(first):
        raise UsageError(
            f"the chat template of {decoder.target.name!r} does not show where a user's words begin; allowed: "
            "--prompts FILE"
        )
    special = tokenizer.special_ids() if isinstance(tokenizer, TokenizerDetails) else frozenset()
    ends = tuple(token for token in first[len(first) - after :][:1] if token in special)
    return first[:before], ends


def read_texts(folder: Path) -> list[MadeText]:
    """The texts that a folder holds."""
    path = folder / FILE
    if not path.exists():
        return []
    texts = []
    with open(path, "rb") as file:
        size = size_of_whole_lines(file)
        file.seek(0)
        for number, line in enumerate(file.read(size).splitlines(), 1):
            try:
                texts.append(MadeText(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise SlipstreamError(f"{str(path)!r}, line {number} is damaged: {first_line(error)}") from error
    return texts


def make_texts(
    folder: Path, maker: TextMaker, num_tokens: int, seconds: float, show: ShowTexts = lambda *_: None
) -> list[MadeText]:
    """The texts of a folder, with further ones until all have `num_tokens` tokens or took `seconds`.

    A text is kept once it and those before it have ended. When the time is over, unfinished ones are kept as they are.
    """
    texts, begun = read_texts(folder), monotonic()
    before = texts[-1].seconds if texts else 0.0
    count, number = sum(len(text.ids) for text in texts), texts[-1].number + 1 if texts else 0

    def passed() -> float:
        return before + monotonic() - begun

    def report(doing: str, unfinished: int) -> None:
        show(doing, count + unfinished, passed())

    report(maker.begins_with, 0)
    with open(folder / FILE, "r+b" if (folder / FILE).exists() else "w+b", buffering=0) as file:
        cut(file, size_of_whole_lines(file))
        file.seek(0, 2)

        def is_over() -> bool:
            return passed() > seconds

        while count < num_tokens and not is_over() and not maker.is_exhausted(number):
            size = min(BATCH, FIRST_BATCH + number)  # small at first, so that a short time yields some texts
            for parts in maker.make(number, size, report, is_over):
                text = MadeText(*parts, round(passed(), 1))
                append(file, (json.dumps(asdict(text)) + "\n").encode())
                texts.append(text)
                count += len(text.ids)
                if count >= num_tokens:
                    break
            number += size
            if not texts and number > 4 * BATCH:
                raise SlipstreamError(f"the target answers nothing: the first {number} texts were empty")
    report(maker.begins_with, 0)
    return texts


def split(texts: Sequence[MadeText], num_held_tokens: int) -> tuple[list[MadeText], list[MadeText]]:
    """Texts to learn from, and texts held out: some of the greedy ones, or of all where none is greedy.

    Other answers to a prompt that is held out are not learned, unless there is no other prompt.
    """
    candidates = [text for text in texts if text.greedy] or list(texts)
    held = list(_first(candidates[::5], num_held_tokens))
    numbers = {text.number for text in held}
    prompts = {tuple(text.ids[: text.start]) for text in held if text.start > 1}
    others = [text for text in texts if text.number not in numbers]
    return [text for text in others if tuple(text.ids[: text.start]) not in prompts] or others, held


def _first(texts: Sequence[MadeText], num_tokens: int) -> Iterator[MadeText]:
    """The first texts, until they have so many tokens."""
    count = 0
    for text in texts:
        if count < num_tokens:
            yield text
        count += len(text.ids)
