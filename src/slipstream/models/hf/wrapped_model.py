"""The causal language model inside a wrapper: torch.compile, data parallelism, PEFT."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import GenerationMixin, PreTrainedModel

from slipstream.errors import UsageError

COMPILED = "_orig_mod"  # where what torch.compile returns has the model


def unwrapped(model: Any) -> Any:
    """The model that generates. Raises `UsageError`, which names an inner model, for other wrappers, and for no model.

    Compiled and parallel forwards compute what the inner model computes; adapters of PEFT that change layers are in the
    inner model's layers.
    """
    while not isinstance(model, GenerationMixin):
        if isinstance(model, nn.Module) and COMPILED in model._modules:
            model = model._modules[COMPILED]
        elif isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif is_peft(model):
            model = _without_peft(model)
        else:
            break
    if isinstance(model, GenerationMixin):
        return model
    if inner := _inner_model(model):
        raise UsageError(f"model of type {type(model).__name__} wraps another one; allowed: that one, {inner}")
    if isinstance(model, PreTrainedModel):
        raise UsageError(
            f"model {type(model).__name__} is not supported: it does not generate; allowed: a causal language model"
        )
    raise UsageError(f"model of type {type(model).__name__}; allowed: a Hugging Face PreTrainedModel")


def is_peft(model: Any) -> bool:
    """Whether this is PEFT's wrapper, which need not be installed here."""
    return any(base.__module__.startswith("peft.") for base in type(model).__mro__)


def _without_peft(model: Any) -> Any:
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise UsageError(
            f"model {type(model).__name__} is not supported: its adapter ({type(config).__name__}) puts virtual tokens "
            "before the prompt; allowed: adapters that change layers (LoRA, ...), or get_base_model() without it"
        )
    return model.get_base_model() if hasattr(model, "get_base_model") else model.base_model.model


def _inner_model(wrapper: nn.Module) -> str:
    """The place and type of the outermost model that generates; empty if there is none."""
    return next(
        (
            f"its .{name} ({type(module).__name__})"
            for name, module in wrapper.named_modules()
            if isinstance(module, GenerationMixin)
        ),
        "",
    )
