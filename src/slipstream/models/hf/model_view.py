"""A view of a loaded model: new module objects over the same weights, so that Slipstream never changes the model.

The caller still owns the model, and can train, save, copy and cast it as before. Packed layers, replaced forwards,
attention settings and eval mode exist only in the view. Before each call the view is compared with its model, which
reveals the owner's changes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy, deepcopy
from functools import partial, update_wrapper
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel

from slipstream.errors import UsageError
from slipstream.models.exclusive_use import arithmetic

CONTAINERS = frozenset((list, set, dict, OrderedDict))
SETTINGS = (PreTrainedConfig, GenerationConfig)
OURS = "_slipstream"  # prefix of attributes that Slipstream sets on a model
MOST_SAMPLES = 1 << 16  # numbers of a tensor that are compared to detect changes
COMPILED = "_orig_mod"  # the attribute of a module from torch.compile that holds the original


class ModelView:
    """A view of a model that detects its owner's changes.

    model: the modules that Slipstream runs. copies_weights: whether replaced modules hold copies of weights, which
    changes of the originals do not reach.
    """

    copies_weights = False
    _copied: Sequence[int] = ()  # a digest of the weights that were copied

    def __init__(self, owned: Any) -> None:
        """owned: the model as its owner has it."""
        self.owned = owned
        self.model = _twin_of(owned)
        modules = list(owned.modules())
        self._attributes = [(vars(module), _frozen(vars(module))) for module in modules]
        settings = {id(value): value for values, _ in self._attributes for value in values.values()}
        self._settings = [(vars(x), _saved(x)) for x in settings.values() if isinstance(x, SETTINGS)]
        tensors = {id(tensor): tensor for m in modules for tensor in (*m._parameters.values(), *m._buffers.values())}
        self._tensors: list[Tensor] = [tensor for tensor in tensors.values() if tensor is not None]
        self._places = [_place(tensor) for tensor in self._tensors]
        self._arithmetic = arithmetic()
        self._samples = [part for tensor in self._tensors if (part := _sample(tensor)) is not None]
        self._values = self._read()

    def is_same_model(self) -> bool:
        """True if the model still has the modules, settings and tensors from which the view was made, whatever their
        values.

        PyTorch's arithmetic must also be unchanged, since cached keys and values depend on it.
        """
        for now, before in self._attributes:
            before["training"] = now["training"]  # the view is always in eval mode
            if not _equal(now, before):
                return False
        same_settings = all(_equal(now, before) for now, before in self._settings)
        same_settings = same_settings and arithmetic() == self._arithmetic
        return same_settings and [_place(tensor) for tensor in self._tensors] == self._places

    def has_same_weights(self) -> bool:
        """True if weights have the values that they had when the view was made or `accept_weights` was called."""
        return self._read() == self._values

    def is_outdated(self) -> bool:
        """True if a new view is needed, because the model or weights that were copied have changed."""
        return not self.is_same_model() or (self.copies_weights and not self.has_same_weights())

    def accept_weights(self) -> None:
        """Let `has_same_weights` compare with the current values from now on."""
        self._values = self._read()

    def note_copies(self) -> None:
        """Call this after replacing modules by others that hold copies of weights."""
        self.copies_weights, self._copied = True, self._digest()

    def compare_copies(self) -> None:
        """Compare all weights with the copies: samples may miss a change of a few numbers through `.data`."""
        if self.copies_weights and self._digest() != self._copied:
            self._values = -1, []

    @torch.inference_mode()
    def _digest(self) -> list[int]:
        """Sums of the bits of all tensors' rows, each times the number of the row."""
        sums = []
        for tensor in self._tensors:
            if _is_plain(tensor):
                rows = tensor.detach().contiguous().view(len(tensor) if tensor.dim() else 1, -1)
                bits = rows.view(torch.int32 if rows.shape[1] * rows.itemsize % 4 == 0 else torch.uint8)
                sums.append((bits.sum(-1) * torch.arange(1, len(bits) + 1, device=bits.device)).sum())
        return [int(total) for total in sums]

    def num_writes(self) -> int:
        """The in-place changes of weights that PyTorch has counted; cheap enough for every round."""
        return sum([0 if tensor.is_inference() else tensor._version for tensor in self._tensors])

    @torch.inference_mode()
    def _read(self) -> tuple[int, list[list[int]]]:
        """`num_writes`, and sums of samples of all tensors: PyTorch does not count changes made through `.data`."""
        sums: dict[torch.device, list[Tensor]] = {}
        for part in self._samples:
            sums.setdefault(part.device, []).append(part.sum(dtype=torch.float32))
        # compared as bits, since NaN equals nothing
        return self.num_writes(), [torch.stack(of_device).view(torch.int32).tolist() for of_device in sums.values()]


def _twin_of(owned: nn.Module) -> Any:
    """A tree of new module objects with the same parameters, buffers, hooks and attributes, in eval mode."""
    twins: dict[int, Any] = {}
    modules = list(owned.modules())
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, PreTrainedConfig):
                deepcopy(value, twins)  # modules keep parts of a configuration as attributes
        is_script = isinstance(module, torch.jit.ScriptModule)  # has no attributes of its own
        twins[id(module)] = module if is_script else object.__new__(type(module))
    for module in modules:
        twin = twins[id(module)]
        if twin is not module:
            attributes = {name: _for_twin(value, twins) for name, value in vars(module).items() if not _is_ours(name)}
            attributes["training"] = False
            attributes["_compiled_call_impl"] = None  # it calls the owner's module
            vars(twin).update(attributes)
            twin._modules.update((name, twins.get(id(child))) for name, child in module._modules.items())
    return twins[id(owned)]


def _for_twin(value: Any, twins: dict[int, Any]) -> Any:
    """An attribute's value for the twin, with twins in place of modules."""
    if type(value) in CONTAINERS:
        return copy(value)
    if isinstance(value, PreTrainedConfig):
        return twins[id(value)]
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return MethodType(value.__func__, twins.get(id(value.__self__), value.__self__))
    if isinstance(value, partial):  # libraries that move weights wrap a module's forward like this
        arguments = [twins.get(id(x), x) if isinstance(x, nn.Module) else x for x in value.args]
        return update_wrapper(partial(value.func, *arguments, **value.keywords), value)
    return value


def _is_ours(name: str) -> bool:
    return name.startswith(OURS)


def _frozen(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes as they are now, containers by content."""
    return {
        name: copy(value) if type(value) in CONTAINERS else value
        for name, value in attributes.items()
        if not _is_ours(name)
    }


def _saved(settings: Any) -> dict[str, Any]:
    copied = deepcopy(vars(settings))
    return copied if _equal(vars(settings), copied) else _frozen(vars(settings))  # not all parts can be compared


def _equal(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """True if attributes are the same objects or equal ones."""
    if len(now) != len(before):
        now = {name: value for name, value in now.items() if not _is_ours(name)}
    try:
        return now == before
    except (RuntimeError, ValueError, TypeError):  # arrays have no single truth value: they count as changed
        return False


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """A key that identifies a tensor's memory."""
    return tensor.dtype, tensor.device, tensor.shape, _address(tensor)


def _address(tensor: Tensor) -> int:
    """The address of a tensor's memory; 0 for tensors without one."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _is_plain(tensor: Tensor) -> bool:
    """True if it has numbers that can be read."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_complex()
    return plain and tensor.device.type != "meta" and tensor.numel() > 0


def _sample(tensor: Tensor) -> Tensor | None:
    """A view that samples every row and, given enough rows, every column; None for tensors without numbers."""
    if not _is_plain(tensor):
        return None
    numbers, columns = tensor.detach(), tensor.shape[-1] if tensor.dim() else 1
    if not numbers.is_contiguous():
        return numbers.select(-1, columns // 2)
    count = min(MOST_SAMPLES, max(columns, numbers.numel() // columns))
    step = numbers.numel() // count
    while math.gcd(step, columns) > 1:  # otherwise it would repeat the same columns
        step += 1
    return numbers.view(-1)[::step]


def unwrapped(model: Any) -> Any:
    """The model that generates, inside known wrappers. Raises `UsageError` for other wrappers and other objects.

    Compiled and parallel forwards compute what the inner model computes; PEFT puts adapters that change layers into the
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
        raise UsageError(f"model of type {type(model).__name__} is a wrapper; allowed: the model inside, {inner}")
    if isinstance(model, PreTrainedModel):
        raise UsageError(
            f"model {type(model).__name__} is not supported: it does not generate; allowed: a causal language model"
        )
    raise UsageError(f"model of type {type(model).__name__}; allowed: a Hugging Face PreTrainedModel")


def is_peft(model: Any) -> bool:
    """True if this is PEFT's wrapper, which need not be installed here."""
    return any(base.__module__.startswith("peft.") for base in type(model).__mro__)


def _without_peft(model: Any) -> Any:
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise UsageError(
            f"model {type(model).__name__} is not supported: its adapter ({type(config).__name__}) puts virtual tokens "
            "before the prompt; allowed: adapters that change layers (LoRA, ...), or get_base_model() without it"
        )
    # the wrapper's own forward computes inputs of the layers, from the whole text
    if getattr(config, "alora_invocation_tokens", None) or getattr(config, "peft_type", None) in ("XLORA", "POLY"):
        raise UsageError(
            f"model {type(model).__name__} is not supported: its adapter ({type(config).__name__}) changes only some "
            "tokens or texts; allowed: adapters that change layers for all tokens (LoRA, ...)"
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
