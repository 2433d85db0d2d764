"""Trials at load that show how a model's forward treats its state; they assume nothing from its name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from slipstream.core.interfaces import Backend
from slipstream.errors import MODEL_ERRORS, SlipstreamError, UsageError, first_line
from slipstream.models.cpu.quantized_linear import rounded_activations
from slipstream.models.hf.own_caches import OwnCacheBackend
from slipstream.models.hf.prepared_inputs import input_device, prepares_inputs_differently
from slipstream.models.hf.trials import RULED_OUT, a_few_tokens, check_logits, difference, later_starts
from slipstream.models.notices import warn_slower

log = logging.getLogger("slipstream")

SWITCHES = ("is_decoder", "causal")  # configuration fields that turn an encoder into a decoder
TOKENS, FIRST = 11, 6  # of a trial; those read before the state is kept
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-3}  # largest `difference` that counts as rounding
# in half precision, and where activations are rounded to integers; forwards of SmolLM2 that are cut in two differ by up
# to 0.08, a wrong mask by 1
CLOSE_ELSE = 0.3
CLOSE_STEPS = 0.1  # likewise, of one forward for several tokens and one for each; a false alarm costs only speed


def own_cache_backend(model: Any) -> OwnCacheBackend:
    """Run a model on caches of its own, after trials that show how it continues from a state.

    Raises `UsageError`, with the reason, for models that cannot continue from a state, or attend to later tokens.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UsageError(f"model {name} is not supported: it is an encoder-decoder model; allowed: decoder-only models")
    if not isinstance(model, GenerationMixin):
        raise UsageError(f"model {name} is not supported: it does not generate; allowed: a causal language model")
    backend = OwnCacheBackend(model)
    try:
        backend.reserve(1, TOKENS)
        close = _close(model)
        ids = a_few_tokens(backend.vocab_size, backend.device, TOKENS)
        whole = backend.forward(ids, [0], first_slot=0, logits=True)
        at_once = whole[:, FIRST:]
        check_logits(at_once)
        backend.module_state.note_changed()
        is_causal(backend, model)
        if not _takes_several(backend, ids) and not _agree(at_once, _steps(backend, ids), close):
            reason = "its logits differ with and without its cache"
            raise UsageError(f"model {name} is not supported: {reason}")
        if not _agree(whole[:, :1], backend.forward(ids[:, :1], [0], first_slot=0, logits=True), close):
            raise UsageError(f"model {name} is not supported: it attends to later tokens; allowed: a causal model")
        steps, several = _after_noise(backend, ids, _steps), _after_noise(backend, ids, _several)
        agree = _agree(steps, several, _close(model, CLOSE_STEPS))
        backend.takes_several_tokens = backend.takes_several_tokens and agree
        if not backend.takes_several_tokens:
            warn_slower(f"{name} reads drafts token by token: one forward for several tokens gives different logits")
        elif prepares_inputs_differently(model):  # it may prepare several tokens differently from single ones
            backend.takes_several_tokens = False
            warn_slower(f"{name} reads drafts token by token: its prepare_inputs_for_generation is its own")
        again = backend.forward(ids[:, FIRST:], [FIRST], first_slot=0, logits=True)
        if not _agree(several if backend.takes_several_tokens else steps, again, close):
            raise UsageError(f"model {name} is not supported: its state after a token cannot be saved and restored")
    except SlipstreamError:
        raise
    except MODEL_ERRORS as error:
        raise UsageError(
            f"model {name} is not supported: a forward of a few tokens fails: {first_line(error)}"
        ) from error
    return backend


def why_not_on_slots(try_forward: Callable[[], bool]) -> str | None:
    """The reason a model cannot run on the slots of a cache, found by a trial; None if it can.

    try_forward: returns whether the model gives its own logits there. Raises `UsageError` for models that are refused
    in any case.
    """
    try:
        return None if try_forward() else "its attention ignores the given positions or masks"
    except UsageError:
        raise
    except MODEL_ERRORS as error:  # it needs its own class of cache, or a two-dimensional mask
        return f"its forward fails on the slots of a cache: {first_line(error)}"


def is_causal(backend: Backend, model: Any) -> bool:
    """True; raises `UsageError` for a model whose configuration makes it attend to later tokens, as encoders do."""
    switches = [name for name in SWITCHES if getattr(model.config, name, None) is False]
    if not switches:
        return True
    backend.reserve(1, TOKENS)
    ids = a_few_tokens(backend.vocab_size, backend.device, TOKENS)
    with_later_tokens = backend.forward(ids, [0], first_slot=0, logits=True)[:, :FIRST]
    without_them = backend.forward(ids[:, :FIRST], [0], first_slot=0, logits=True)
    if not _agree(with_later_tokens, without_them, _close(model)):
        raise UsageError(
            f"model {type(model).__name__} attends to later tokens: {switches[0]}=False in its config; allowed: True"
        )
    return True


@torch.inference_mode()
def differ(model: Any, logits: Tensor, later: Tensor | None = None) -> bool:
    """True if a model's own logits of `a_few_tokens` differ from these [1, 9, V], which came from a slot cache.

    later: [T, 9, V] logits of the same tokens at later positions, computed in one batch. Raises `UsageError` if a row's
    logits depend on the positions in other rows.
    """
    tokens = a_few_tokens(logits.shape[-1], input_device(model))
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]  # `generate` gives them too
    expected, close = logits.nan_to_num(), CLOSE_ELSE if rounded_activations(model) else _close(model)
    own_logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    if not _agree(own_logits.nan_to_num(), expected.to(own_logits.dtype), close):
        return True
    for start, logits_beside_others in () if later is None else zip(later_starts(model), later, strict=True):
        own_logits = model(input_ids=tokens, position_ids=positions + start, use_cache=False).logits
        alone = [own_logits.nan_to_num()] if start else [own_logits.nan_to_num(), expected.to(own_logits.dtype)]
        if any(_agree(logits, logits_beside_others[None].nan_to_num().to(own_logits.dtype), close) for logits in alone):
            continue
        if start:
            return True
        raise UsageError(
            f"model {type(model).__name__} is not supported: its logits for a text depend on the length of "
            "other texts in the batch; allowed: models whose rotations depend on a token's own position"
        )
    return False


def _takes_several(backend: OwnCacheBackend, ids: Tensor) -> bool:
    """True if the model reads several tokens after a state at all."""
    backend.forward(ids[:, :FIRST], [0], first_slot=0, logits=False)
    try:
        _several(backend, ids)
    except MODEL_ERRORS as error:
        log.info("%s takes one token after a state, not several: %s", type(backend.model).__name__, error)
        backend.takes_several_tokens = False
        return False
    return True


@torch.inference_mode()
def _after_noise(backend: OwnCacheBackend, ids: Tensor, read: Callable[[OwnCacheBackend, Tensor], Tensor]) -> Tensor:
    """Logits of the tokens after the first ones, with noise in the state before them: they differ if it is read."""
    backend.forward(ids[:, :FIRST], [0], first_slot=0, logits=False)
    backend.caches.add_noise(0, FIRST)
    return read(backend, ids)


def _several(backend: OwnCacheBackend, ids: Tensor) -> Tensor:
    return backend.forward(ids[:, FIRST:], [FIRST], first_slot=0, logits=True)


def _steps(backend: OwnCacheBackend, ids: Tensor) -> Tensor:
    return torch.cat(
        [backend.forward(ids[:, i : i + 1], [i], first_slot=0, logits=True) for i in range(FIRST, TOKENS)], 1
    )


def _close(model: Any, in_half_precision: float = CLOSE_ELSE) -> float:
    """The largest `difference` that counts as rounding, by the type of the weights: logits may always be float32."""
    return CLOSE.get(model.dtype, in_half_precision)


def _agree(first: Tensor, second: Tensor, close: float) -> bool:
    """True if logits have a `difference` of at most `close`; NaN differs from everything.

    Tokens that both rule out do not count.
    """
    ruled_out = (first < RULED_OUT) & (second < RULED_OUT)
    apart = difference(second.masked_fill(ruled_out, 0.0), first.masked_fill(ruled_out, 0.0))
    return apart <= close
