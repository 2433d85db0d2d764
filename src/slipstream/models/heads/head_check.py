"""Tries a draft head on a text, because a wrong layer number or flag raises no error but makes drafts bad.

Trainers number a target's layers in two ways, and readers differ in the default of a flag that a file does not set. So
the head guesses the target's next tokens with the settings that its files declare, and with those that may have been
meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from slipstream.models.heads.head_backend import HeadBackend
from slipstream.models.heads.network import HeadConfig, Network, grouped_attention
from slipstream.models.hf.decoder_layers import decoder_layers
from slipstream.models.loaded import Loaded
from slipstream.models.toy import FABLE

LENGTH = 160  # tokens of the text
CLEAR = 3.0  # clear difference, in standard deviations of the difference between two equally good settings
USELESS = 0.05  # with a smaller share of right guesses the head costs more than it brings
QUESTION = "Tell me a fable about a heron."


@dataclass(frozen=True)
class HeadAgreement:
    """Shares of positions at which a head guesses the target's likeliest token, over two steps of a draft.

    declared: with the settings of its files. best: with the settings named `meant`, if these are clearly better. note:
    how the files were read, if not literally.
    """

    declared: float
    best: float | None = None
    meant: str = ""
    note: str = ""

    @property
    def is_warning(self) -> bool:
        """True if the head drafts badly: other settings are better, or it guesses next to nothing."""
        return self.best is not None or self.declared < USELESS

    def line(self, head: str, target: str) -> str:
        """The result in one line."""
        shares = f"draft head {head!r} guesses {self.declared:.0%} of the tokens of {target!r}{self.note}"
        if self.best is None:
            return f"{shares}, too few to save time" if self.is_warning else shares
        return f"{shares} as its config.json says, but {self.best:.0%} with {self.meant}: its config.json may be wrong"


def agreement(draft: Loaded, target: Loaded) -> HeadAgreement | None:
    """How well a head agrees with its target on a fixed text; None without a tokenizer, and unless the head has one
    layer and drafts token by token."""
    tokenizer = target.tokenizer
    if tokenizer is None or not isinstance(draft.backend, HeadBackend) or draft.backend.mask_token is not None:
        return None
    network = draft.backend.network
    if len(network.config.windows) > 1:
        return None
    question = tokenizer.chat([{"role": "user", "content": QUESTION}]) if tokenizer.has_chat_template else []
    length = min(LENGTH, network.config.max_length)
    text = torch.tensor([*question, *tokenizer.bare(FABLE)][:length], device=draft.backend.device)
    states, likeliest = _states(target, text)
    settings = _settings(network.config, len(states) - 1)
    right = {name: _right_guesses(_with_config(network, config), text, states, likeliest) for name, config in settings}
    declared, note = right.pop(""), ""
    if network.config.listed_layers not in ((), network.config.layers):
        note = f" with layers {list(network.config.layers)} in ascending order"
    meant = max(right, key=lambda name: int(right[name].sum()), default="")
    if meant and _is_clearly_better(right[meant], declared):
        return HeadAgreement(_share(declared), _share(right[meant]), meant, note)
    return HeadAgreement(_share(declared), note=note)


def _settings(config: HeadConfig, count: int) -> Iterator[tuple[str, HeadConfig]]:
    """The configurations to try, each with a description of its change; the declared one comes first, with ""."""
    flags = [name for name in config.unclear if name != "layers"]
    for values in product(*([getattr(config, name), not getattr(config, name)] for name in flags)):
        changed = {name: value for name, value in zip(flags, values, strict=True) if value != getattr(config, name)}
        yield ", ".join(f"{name}={value}" for name, value in changed.items()), replace(config, **changed)
    if "layers" not in config.unclear:
        return
    shifted = [tuple(i + shift for i in config.layers) for shift in (-1, 1)]
    for layers in (*shifted, config.listed_layers or config.layers):
        if layers != config.layers and min(layers) >= 0 and max(layers) <= count:
            yield f"layers {list(layers)} (inputs of layers, from 0)", replace(config, layers=layers)


def _with_config(network: Network, config: HeadConfig) -> Network:
    other = copy(network)  # the weights are shared
    other.config = config
    return other


@torch.inference_mode()
def _states(target: Loaded, text: Tensor) -> tuple[list[Tensor], Tensor]:
    """The input of each of the target's layers and the last one's output, [N, H]; its likeliest next tokens [N]."""
    model, states = target.backend.model, list[Tensor]()  # type: ignore[attr-defined]
    _, layers = decoder_layers(model, model.config.get_text_config().num_hidden_layers)

    def keep(layer: torch.nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Tensor]) -> None:
        states.append((inputs[0] if inputs else options["hidden_states"])[0])

    def keep_last(layer: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        states.append((output[0] if isinstance(output, tuple) else output)[0])

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(keep, with_kwargs=True))
        hooks.enter_context(layers[-1].register_forward_hook(keep_last))
        logits = model(input_ids=text[None], use_cache=False).logits[0]
    return states, logits.argmax(-1)


@torch.inference_mode()
def _right_guesses(network: Network, text: Tensor, states: Sequence[Tensor], likeliest: Tensor) -> Tensor:
    """[2N - 3], True for right guesses: first of the text's rows, then of the same rows as second steps of drafts.

    A second step reads the first step's output in place of an unknown feature, so the flags for both are tried.
    """
    token_ids = network.config.token_ids
    features = torch.cat([states[i] for i in network.config.layers], -1)[:-1]
    positions = torch.arange(1, len(text), device=text.device)[None]
    cached: list[Tensor] = []
    first = network.layer(text[None, 1:], network.enter(features)[None], positions, partial(_attend, cached))
    later = network.layer(
        text[None, 2:], network.returned(first)[:, :-1], positions[:, 1:], partial(_attend_later, cached)
    )
    right = []
    for skipped, outputs in ((1, first), (2, later)):
        guesses = network.draft_logits(outputs)[0].argmax(-1)
        guesses = guesses if token_ids is None else token_ids.to(guesses.device)[guesses]
        right.append(guesses == likeliest[skipped:])
    return torch.cat(right)


def _attend(cached: list[Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    cached[:] = key, value
    return grouped_attention(query, key, value, _triangle(query)[None])


def _attend_later(cached: Sequence[Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each row sees the first step's rows up to the one before it, and itself."""
    keys, values = (torch.cat([old[:, :, :-1], new], 2) for old, new in zip(cached, (key, value), strict=True))
    before = _triangle(query)
    return grouped_attention(query, keys, values, torch.cat([before, before & before.T], -1)[None])


def _triangle(query: Tensor) -> Tensor:
    width = query.shape[2]
    return torch.ones(width, width, dtype=torch.bool, device=query.device).tril()


def _share(right: Tensor) -> float:
    return float(right.float().mean())


def _is_clearly_better(right: Tensor, other: Tensor) -> bool:
    """True if guesses are right where `other` is wrong, more often than the reverse and beyond chance."""
    gained, lost = int((right & ~other).sum()), int((other & ~right).sum())
    return gained - lost > CLEAR * max(1, gained + lost) ** 0.5
