"""`slipstream train`: makes texts, trains a head on them, and writes it where `--draft` reads it.

The folder holds the texts, the state from which a run continues, the head, and its judgments. A further run must have
the settings in `settings.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from slipstream.bench.report.plots import Chart, Line, Point, save
from slipstream.checks import counted
from slipstream.decoder import SpeculativeDecoder
from slipstream.draft_length.costs import CostModel
from slipstream.durable_files import locked, replaced
from slipstream.errors import SlipstreamError, UsageError, one_line, os_reason
from slipstream.models.heads.head_writer import write_head
from slipstream.models.heads.starting_weights import model_of, new_head, starting_weights
from slipstream.models.weights.resolve import resolve
from slipstream.training.held_out import Judgment, judged
from slipstream.training.texts import FILE, LONGEST, MadeText, TextMaker, make_texts, read_sources, read_texts, split
from slipstream.training.trainable_head import STEPS, Batch, FrozenTarget, TrainableHead, precision, usual_sizes
from slipstream.training.training_run import (
    FEWEST_STEPS,
    JUDGED,
    PASSES,
    STATE,
    State,
    TrainingRun,
    batches,
    tokens_of_step,
)
from slipstream.version import __version__
from slipstream.wiring.model_pair import fingerprint_of

SETTINGS, PROGRESS, LOCK = "settings.json", "progress.jsonl", ".lock"
TEXTS_SHARE = 0.5  # share of the time for making texts
HELD_TOKENS = 4096  # tokens of the texts that are held out
SIZES = (2048, 4096, 8192, 16384, 32768)  # of draft vocabularies
FINGERPRINT = "fingerprint"  # the setting that identifies the target
COVERED = 0.97  # share of the held-out texts' tokens that the draft vocabulary has


@dataclass(frozen=True)
class TrainingSettings:
    """The target, the data and the limits of a training."""

    target: str
    folder: Path
    prompts: Path | None = None
    num_tokens: int = 2_000_000
    hours: float = 3.0
    num_steps: int | None = None  # None for as many as the texts and the time allow
    seed: int = 0

    def shared(self) -> dict[str, Any]:
        """The settings that every further run of the folder must share."""
        prompts = None if self.prompts is None else sha256(self.prompts.read_bytes()).hexdigest()
        return {
            "target": self.target,
            "prompts": prompts,
            "tokens": self.num_tokens,
            "steps": self.num_steps,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of a run."""

    doing: str
    completed: int  # of `total`, in `unit`
    total: int
    unit: str  # "tokens" of texts, or "steps"
    seconds_left: float  # until the whole run ends, at most
    latest: dict[str, Any] | None = None  # the newest judgment


Show = Callable[[TrainingProgress], None]


@dataclass
class TrainingJob:
    """Trains a head in a folder, or continues what an earlier run left there."""

    settings: TrainingSettings
    show: Show = lambda progress: None
    _sources: Sequence[Any] = field(init=False, default=())

    def __post_init__(self) -> None:
        """Check everything that can be checked before a model is loaded."""
        settings = self.settings
        if settings.prompts is not None:
            self._sources = read_sources(settings.prompts)
        path = settings.folder / SETTINGS
        if path.exists():
            self._compare(path, settings.shared())
        if (settings.folder / LOCK).exists():
            with self._errors_with_saved(), _lock(settings.folder):
                pass  # fails if another process is training there

    def make_folder(self) -> None:
        """Make the folder; called before a model is loaded, so that it fails early."""
        with self._errors_with_saved():
            self.settings.folder.mkdir(parents=True, exist_ok=True)

    def run(self, decoder: SpeculativeDecoder) -> dict[str, Any]:
        """Train with the target of this decoder; returns the last judgment and the place of the head."""
        settings, folder = self.settings, self.settings.folder
        frozen = FrozenTarget(decoder.target)
        frozen.read(torch.zeros(1, 2, dtype=torch.int64, device=frozen.device))  # refuses without hidden states
        decoder.forget()  # the KV cache is overwritten
        self.make_folder()
        with self._errors_with_saved(), _lock(folder):
            self._check_settings({FINGERPRINT: fingerprint_of(decoder.target, decoder.shapes)})
            state = State.read(folder)
            texts = self._texts(decoder, state)
            begun = monotonic()
            learned, held = split(texts, HELD_TOKENS)
            if not learned:
                raise UsageError(
                    f"--hours {settings.hours:g} and --tokens {settings.num_tokens} suffice for "
                    f"{counted(len(texts), 'text')}; allowed: enough for two or more"
                )
            decoder.forget()  # the KV cache will be overwritten
            judging = batches(held, frozen.device)
            if state is None:
                state = self._first_state(frozen, texts, learned, held)
                state.seconds += monotonic() - begun
            elif self._max_seconds > state.max_seconds:  # less time may have ended texts and steps
                state.seconds += texts[-1].seconds - texts[state.num_texts - 1].seconds
                state.num_texts, state.num_tokens = len(texts), num_tokens_of(learned)
                state.planned = max(state.step, self._num_steps(frozen, state.num_tokens))
            state.max_seconds, step_before = self._max_seconds, state.step
            config = new_head(decoder.target, LONGEST + STEPS, state.token_ids)
            head = TrainableHead(config, state.weights, state.feature_size, frozen).to(frozen.device)
            run = TrainingRun(folder, head, learned, state, settings.seed)
            self._train(decoder, run, judging)
            if not state.step:
                raise UsageError(
                    f"--hours {settings.hours:g} ended before the first training step; allowed: more hours (the same "
                    "command continues)"
                )
            is_over = state.step >= self._num_steps(frozen, state.num_tokens) and not self._lacks_texts(texts)
            facts = {"steps": state.step, "new_steps": state.step - step_before, "finished": is_over}
            return {"folder": str(folder), **facts, "texts": len(texts)} | state.judgments[-1]

    @property
    def saved(self) -> str:
        """The content of the folder, for messages."""
        folder = self.settings.folder
        if (state := State.read(folder)) is not None:
            return f"{folder / STATE} holds step {state.step}"
        if texts := read_texts(folder):
            return f"{folder / FILE} holds {num_tokens_of(texts)} tokens of texts"
        return "nothing was saved yet"

    def _texts(self, decoder: SpeculativeDecoder, state: State | None) -> list[MadeText]:
        """The texts that this run trains with; more are made if there is more time than before."""
        if state is None:
            return self._make_texts(decoder)
        texts = read_texts(self.settings.folder)
        if len(texts) < state.num_texts:
            raise SlipstreamError(
                f"{str(self.settings.folder / FILE)!r} holds {len(texts)} texts; allowed: the {state.num_texts} with "
                "which training began, or another folder"
            )
        return self._make_texts(decoder) if self._max_seconds > state.max_seconds else texts[: state.num_texts]

    def _lacks_texts(self, texts: Sequence[MadeText]) -> bool:
        """True if a run with more time would make more texts and train on them."""
        is_made = not self._sources or any(source.prompt is not None for source in self._sources)
        return is_made and self.settings.num_steps is None and num_tokens_of(texts) < self.settings.num_tokens

    def _num_steps(self, frozen: FrozenTarget, num_tokens: int) -> int:
        """Number of steps, unless time runs out sooner."""
        passes = ceil(PASSES * num_tokens / tokens_of_step(frozen.device)[0])
        return self.settings.num_steps or max(FEWEST_STEPS, passes)

    def _make_texts(self, decoder: SpeculativeDecoder) -> list[MadeText]:
        settings, seconds = self.settings, self._max_seconds * TEXTS_SHARE
        maker = TextMaker(decoder, self._sources, settings.seed)

        def show(doing: str, tokens: int, passed: float) -> None:
            seconds_left = max(0.0, self._max_seconds - passed)
            tokens = min(tokens, settings.num_tokens)
            self.show(TrainingProgress(doing, tokens, settings.num_tokens, "tokens", seconds_left))

        return make_texts(settings.folder, maker, settings.num_tokens, seconds, show)

    def _first_state(
        self, frozen: FrozenTarget, texts: Sequence[MadeText], learned: Sequence[MadeText], held: Sequence[MadeText]
    ) -> State:
        settings, target = self.settings, frozen.target
        token_ids = draft_vocabulary(learned, held, target.backend.vocab_size)
        config = new_head(target, LONGEST + STEPS, token_ids)
        num_tokens = num_tokens_of(learned)
        return State(
            step=0,
            planned=self._num_steps(frozen, num_tokens),
            max_seconds=self._max_seconds,
            num_texts=len(texts),
            num_tokens=num_tokens,
            seconds=texts[-1].seconds,
            weights=starting_weights(target, config, settings.seed),
            feature_size=usual_sizes(frozen, batches(held, frozen.device)),
            token_ids=token_ids,
        )

    def _train(self, decoder: SpeculativeDecoder, run: TrainingRun, judging: list[Batch]) -> None:
        folder, costs = self.settings.folder, list[CostModel]()

        def judge(head: TrainableHead, state: State) -> Judgment:
            if not costs:  # heads of these sizes take the same time, whatever they have learned
                self._write(decoder, head, state, None)
                drafting = decoder.with_draft(str(folder)).using("model", num_draft_tokens="chain")
                costs.append(drafting.costs)
                drafting.close()
                decoder.forget()
            judgment = judged(head, judging, costs[0])
            self._write(decoder, head, state, judgment)
            return judgment

        if run.state.step >= run.state.planned and run.state.judgments:  # its files may have been lost since
            last = {item.name: run.state.judgments[-1][item.name] for item in fields(Judgment)}
            self._write(decoder, run.head, run.state, Judgment(**last))

        def show(doing: str, state: State) -> None:
            latest = state.judgments[-1] if state.judgments else None
            self.show(TrainingProgress(doing, state.step, state.planned, "steps", run.seconds_left, latest))

        show("judging the head", run.state)
        shown = 0
        for state in run.steps(judge):
            show("training", state)
            if len(state.judgments) != shown:
                shown = len(state.judgments)
                _write_lines(folder / PROGRESS, state.judgments)
        _write_lines(folder / PROGRESS, run.state.judgments)
        draw(folder, run.state)

    def _write(self, decoder: SpeculativeDecoder, head: TrainableHead, state: State, last: Judgment | None) -> None:
        model, settings = model_of(decoder.target), self.settings
        trained: dict[str, Any] = {
            "by": f"slipstream train {__version__}",
            "target": settings.target,
            "texts": state.num_texts,
            "tokens": state.num_tokens,
            "steps": state.step,
            "planned_steps": state.planned,
            "seed": settings.seed,
        }
        if last is not None:
            trained |= {"held_out_tokens_per_round": round(last.tokens_per_round, 3)}
        write_head(
            settings.folder,
            replace(head.config, token_ids=state.token_ids),
            head.served_weights(),
            dtype=precision(model.dtype),
            target={
                "name_or_path": name_for_others(decoder.target.source) if decoder.target.source else settings.target,
                "architectures": model.config.architectures or [type(model).__name__],
                "max_length": decoder.target.backend.max_length,
            },
            num_draft_tokens=STEPS if last is None else max(1, last.num_draft_tokens),
            trained=trained,
        )

    @property
    def _max_seconds(self) -> float:
        return 3600 * self.settings.hours

    def _check_settings(self, more: dict[str, Any]) -> None:
        """Refuse settings that differ from those of earlier runs of the folder; the first run writes its own."""
        path = self.settings.folder / SETTINGS
        shared = self.settings.shared() | more
        if path.exists():
            self._compare(path, shared)
            return
        with replaced(path) as partial:
            partial.write_text(json.dumps(shared, indent=1), encoding="utf-8")

    def _compare(self, path: Path, shared: dict[str, Any]) -> None:
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            different = next((name for name in shared if stored[name] != shared[name]), None)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise SlipstreamError(f"{str(path)!r} could not be read: {one_line(error)}") from error
        if different == FINGERPRINT:
            raise UsageError(
                f"--out {str(path.parent)!r} was trained for a target with fingerprint {stored[different]!r}; that of "
                f"{self.settings.target!r} is now {shared[different]!r}, because its weights, tokenizer, chat template "
                "or device, PyTorch or Slipstream changed; allowed: the target as it was, or another folder"
            )
        if different is not None:
            raise UsageError(
                f"--out {str(path.parent)!r} was trained with {different}={stored[different]!r}, not "
                f"{shared[different]!r}; allowed: the same, or another folder"
            )

    @contextmanager
    def _errors_with_saved(self) -> Iterator[None]:
        """Add the content of the folder to errors in the block."""
        try:
            yield
        except UsageError:
            raise
        except SlipstreamError as error:
            raise SlipstreamError(f"{error}; {self.saved}") from error
        except OSError as error:
            place = error.filename or self.settings.folder
            raise SlipstreamError(f"{str(place)!r}: {os_reason(error)}; {self.saved}") from error


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep other processes from training in the folder."""
    lock = locked(folder / LOCK)
    if lock is None:
        raise UsageError(f"--out {str(folder)!r} is in use by another process that trains; allowed: another folder")
    try:
        yield
    finally:
        lock.release()


def num_tokens_of(texts: Sequence[MadeText]) -> int:
    """Number of tokens of all these texts."""
    return sum(len(text.ids) for text in texts)


def name_for_others(target: str) -> str:
    """The name by which other programs find a target: its hub id, or the absolute path of its folder."""
    place = resolve(target)
    return str(Path(place).resolve()) if Path(place).is_dir() else place


def draft_vocabulary(learned: Sequence[MadeText], held: Sequence[MadeText], vocab_size: int) -> torch.Tensor:
    """Ids of the most frequent tokens, ascending: the smallest of `SIZES` that covers the held-out texts well.

    Well means at least COVERED of the share that all tokens of the learned texts cover.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for text in learned:
        counts += torch.bincount(torch.tensor(text.ids[text.start :]), minlength=vocab_size)
    order = counts.argsort(descending=True, stable=True)
    held_ids = torch.tensor([token for text in held for token in text.ids[text.start :]])

    def covered(size: int) -> float:
        return float(torch.isin(held_ids, order[:size]).float().mean())

    sizes = [min(size, vocab_size) for size in SIZES]
    needed = COVERED * covered(int((counts > 0).sum()))
    size = next((size for size in sizes if covered(size) >= needed), sizes[-1])
    return order[:size].sort().values


def draw(folder: Path, state: State) -> None:
    """Draw the curve of the judgments, where matplotlib is installed."""
    if find_spec("matplotlib") is None:
        return
    points = {
        "tokens per round": [judgment["tokens_per_round"] for judgment in state.judgments],
        "estimated speed-up": [judgment["tokens_per_second"] / judgment["plain"] for judgment in state.judgments],
    }
    lines = tuple(
        Line(name, tuple(Point(i, value) for i, value in enumerate(values)), look)
        for look, (name, values) in enumerate(points.items())
    )
    label = f"eighths of {state.step} steps" if len(state.judgments) == JUDGED + 1 else "judgments"
    save([Chart("curve", "Held-out texts", "", label, "", lines, level=1.0)], folder)


def _write_lines(path: Path, items: Sequence[dict[str, Any]]) -> None:
    with replaced(path) as partial:
        partial.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
