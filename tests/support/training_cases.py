"""A tiny target whose texts a head can learn in seconds, and training jobs for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from slipstream import SpeculativeDecoder
from slipstream.training import texts, training_job, training_run
from slipstream.training.training_job import TrainingJob, TrainingSettings
from tests.support.tiny_models import fresh, tokenizer

TOKENS, STEPS = 3000, 40


@cache
def target() -> Any:
    """A model whose next token depends mostly on the last few."""
    return fresh("llama", num_hidden_layers=4, initializer_range=0.1)


def write_target(folder: Path, template: bool = True) -> Path:
    """The target as a folder that the command line reads."""
    target().save_pretrained(folder)
    (tokenizer() if template else tokenizer(template=None)).save_pretrained(folder)
    return folder


def decoder(**settings: Any) -> SpeculativeDecoder:
    options = {"acceptance": "match", "tokenizer": tokenizer()} | settings
    return SpeculativeDecoder(target(), **options)


@contextmanager
def small(draw: Callable[..., None] = lambda *_: None) -> Iterator[None]:
    """Trains on short texts in small batches, saves the state after every step and by default draws no curve."""
    with (
        patch.multiple(texts, QUESTION=12, ANSWER=60, BATCH=8),
        patch.multiple(training_job, tokens_of_step=lambda device: (256, 128), draw=draw),
        patch.multiple(training_run, SAVE_SECONDS=0.0, SAVE_SHARE=1e9, tokens_of_step=lambda device: (256, 128)),
    ):
        yield


def job(folder: Path, **settings: Any) -> TrainingJob:
    options = {"num_tokens": TOKENS, "num_steps": STEPS} | settings
    return TrainingJob(TrainingSettings("tiny", folder, **options))


def train(folder: Path, **settings: Any) -> dict[str, Any]:
    with small():
        return job(folder, **settings).run(decoder())
