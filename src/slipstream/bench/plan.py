"""The measurements and their order: arms in turn on each group of prompts, then the next repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from slipstream.bench.arms import Arm, runs_in_batches
from slipstream.errors import UsageError
from slipstream.text.prompt_sets import NamedPrompt

MIXED = "mixed"

Key = tuple[str, tuple[str, ...], int, int]  # of a run: arm, prompts, batch size, repeat


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt, its name in records (`family/number`), and its index among all prompts."""

    id: str
    family: str
    index: int
    text: str
    prediction: str | None = None

    @property
    def digest(self) -> str:
        """A hash of the prompt and its prediction, which shows whether two runs share the prompt of this name."""
        return sha256((self.text + (self.prediction or "")).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Group:
    """Prompts that are decoded together."""

    prompts: tuple[BenchPrompt, ...]

    @property
    def ids(self) -> list[str]:
        """The prompts' names in records."""
        return [prompt.id for prompt in self.prompts]

    @property
    def family(self) -> str:
        """The family of all prompts, or "mixed"."""
        families = {prompt.family for prompt in self.prompts}
        return next(iter(families)) if len(families) == 1 else MIXED


@dataclass(frozen=True)
class Measurement:
    """One arm on one group, once."""

    arm: Arm
    group: Group
    batch: int
    repeat: int

    @property
    def key(self) -> Key:
        return self.arm.name, tuple(self.group.ids), self.batch, self.repeat


def name_prompts(prompts: Sequence[NamedPrompt]) -> list[BenchPrompt]:
    """Number the prompts of each family from 1."""
    seen: dict[str, int] = {}
    named = []
    for index, prompt in enumerate(prompts):
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        name = f"{prompt.category}/{seen[prompt.category]}"
        named.append(BenchPrompt(name, prompt.category, index, prompt.prompt, prompt.prediction))
    return named


def groups(prompts: Sequence[BenchPrompt], batch: int, name: str = "batch size") -> list[Group]:
    """Groups of exactly `batch` different prompts, of one family if possible, which contain every prompt.

    Prompts that are left over in their families are grouped together; a last group that is too small is filled with
    prompts from the beginning of the list, which are then measured twice at this batch size. name: of `batch`, for
    errors.
    """
    if not 1 <= batch <= len(prompts):
        raise UsageError(f"{name} {batch}; allowed: 1 to {len(prompts)}, the number of prompts")
    whole_groups, remaining = [], list[BenchPrompt]()
    for family in dict.fromkeys(prompt.family for prompt in prompts):
        of_family = [prompt for prompt in prompts if prompt.family == family]
        count = len(of_family) - len(of_family) % batch
        whole_groups += [Group(tuple(of_family[start : start + batch])) for start in range(0, count, batch)]
        remaining += of_family[count:]
    for start in range(0, len(remaining), batch):
        members = remaining[start : start + batch]
        others = [prompt for prompt in prompts if prompt not in members]
        whole_groups.append(Group(tuple(members + others[: batch - len(members)])))
    return whole_groups


def plan(
    arms: Sequence[Arm],
    prompts: Sequence[BenchPrompt],
    batches: Sequence[int],
    repeats: int,
    at_once: int | None = None,
) -> list[Measurement]:
    """All measurements in order; baselines that decode one prompt at a time are left out of larger batches.

    at_once: number of prompts per call; by default as many as are decoded together.
    """
    if at_once is not None and at_once < max(batches):
        raise UsageError(f"--at-once {at_once}; allowed: at least the batch size, {max(batches)}")
    if repeats < 1:
        raise UsageError(f"repeats={repeats}; allowed: at least 1")
    if not batches or len(set(batches)) != len(batches):
        raise UsageError(f"batch sizes {', '.join(map(str, batches))}; allowed: different whole numbers")
    planned: list[Measurement] = []
    for batch in batches:
        able = [arm for arm in arms if batch == 1 or runs_in_batches(arm)]
        for group in groups(prompts, batch) if at_once is None else groups(prompts, at_once, "--at-once"):
            for repeat in range(repeats):
                planned += [Measurement(arm, group, batch, repeat) for arm in able]
    if idle := [arm.name for arm in arms if not any(measurement.arm is arm for measurement in planned)]:
        raise UsageError(f"arm {idle[0]!r} decodes one prompt at a time; allowed: batch size 1 among --batch-sizes")
    return planned
