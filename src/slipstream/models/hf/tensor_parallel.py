"""A target across several processes: each holds a part of every layer, as transformers' plan for the model says.

Rank 0 drafts and decides, and sends each call of its backend to the other ranks, which run it on their parts. Start it
with torchrun and `load_options={"tp_plan": "auto"}`.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import os
import sys
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from slipstream.core.trees import TreeSegment
from slipstream.errors import SlipstreamError, UsageError, first_line
from slipstream.models.hf.backend import HFBackend
from slipstream.models.loaded import PLAN, LoadOptions

FOREVER = timedelta(days=365)  # how long followers wait for a call
STOP = "stop"


class TensorParallelBackend(HFBackend):
    """One rank's part of a model. Rank 0 first sends the others every call that runs a forward or uses the cache.

    ranks: the group over which calls are sent. A failure ends the job on every rank.
    """

    def __init__(self, model: Any, ranks: Any) -> None:
        self._ranks, self._failed, self._leads = ranks, False, False
        super().__init__(model)
        self._leads = dist.get_rank() == 0  # rank 0 sends calls from here on

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method here and, from rank 0, on every other rank; returns the result here."""
        if self._leads:
            self._send((name, args, options))
        try:
            return getattr(self if name.startswith("_") else super(), name)(*args, **options)
        except (RuntimeError, MemoryError) as error:
            self._failed = True
            raise SlipstreamError(f"rank {dist.get_rank()}: {name} failed: {first_line(error)}") from error

    def _send(self, call: Any) -> None:
        if self._failed:
            raise SlipstreamError("another rank has failed; start the job again")
        try:
            dist.broadcast_object_list([_moved(call, torch.device("cpu"))], src=0, group=self._ranks)
        except RuntimeError as error:
            self._failed = True
            raise SlipstreamError(f"rank 0: another rank has ended: {first_line(error)}") from error

    def reserve(self, rows: int, length: int) -> None:
        self._call("reserve", rows, length)

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        scores: Tensor = self._call("forward", tokens, starts, first_slot=first_slot, logits=logits)
        return scores

    def answer(self, tokens: Tensor, start: int, *, slot: int, columns: Tensor) -> Tensor:
        scores: Tensor = self._call("answer", tokens, start, slot=slot, columns=columns)
        return scores

    def forward_tree(self, tokens: Tensor, segments: Sequence[TreeSegment], *, widths: Sequence[int] | None) -> Tensor:
        scores: Tensor = self._call("forward_tree", tokens, segments, widths=widths)
        return scores

    def move(self, slot: int, places: Sequence[int], start: int) -> None:
        self._call("move", slot, places, start)

    def copy(self, source: int, destination: int, length: int) -> None:
        self._call("copy", source, destination, length)

    def mark_final(self, slot: int, position: int) -> None:
        """Models with recurrent layers are refused."""

    def read_as(self, slot: int, *, is_long: bool) -> None:
        if is_long != (slot in self._long_slots):
            self._call("read_as", slot, is_long=is_long)

    @property
    def attended_unit(self) -> int:
        return self.cache.attended_unit

    @attended_unit.setter
    def attended_unit(self, unit: int) -> None:
        if unit != self.cache.attended_unit:
            self._call("_set_attended_unit", unit)

    @property
    def attended_lengths(self) -> tuple[int, ...]:
        return self.cache.attended_lengths

    @attended_lengths.setter
    def attended_lengths(self, lengths: tuple[int, ...]) -> None:
        if lengths != self.cache.attended_lengths and self.device.type == "cpu":
            self._call("_set_attended_lengths", lengths)

    def _set_attended_unit(self, unit: int) -> None:
        self.cache.attended_unit = unit

    def _set_attended_lengths(self, lengths: tuple[int, ...]) -> None:
        self.cache.attended_lengths = lengths

    def weights_digest(self) -> str:
        digest = hashlib.sha256(repr(dist.get_world_size()).encode())
        for name, weight in sorted(self.model.state_dict().items()):
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            digest.update(name.encode() + local.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def layer_kinds(self) -> Sequence[Hashable]:
        """Refused: all ranks run every forward, so parts cannot be measured alone."""
        raise UsageError("a tensor-parallel model has no parts that run alone; allowed: the whole model")

    def layer_subset(self, layers: Sequence[int]) -> HFBackend:
        """Refused: a part of the layers would run on one rank alone."""
        raise UsageError("drafter='layer_skip' with a tensor-parallel target; allowed: another drafter")

    def separate_subset(self, layers: Sequence[int]) -> HFBackend:
        return self.layer_subset(layers)

    def follow(self) -> NoReturn:
        """On ranks other than 0: run the calls that rank 0 sends until it sends `STOP`, then end the process."""
        rank = dist.get_rank()
        try:
            while True:
                box: list[Any] = [None]
                dist.broadcast_object_list(box, src=0, group=self._ranks)
                if box[0] == STOP:
                    self._leave()
                    sys.exit(0)
                name, args, options = _moved(box[0], self.device)
                self._call(name, *args, **options)
        except (SlipstreamError, RuntimeError) as error:
            why = first_line(error) if isinstance(error, SlipstreamError) else f"rank {rank}: rank 0 has ended"
            print(f"error: {why}", file=sys.stderr, flush=True)
            os._exit(1)  # a group with a dead rank cannot be closed cleanly

    def stop(self) -> None:
        """On rank 0: let the others end."""
        if self._leads and not self._failed:
            with suppress(SlipstreamError):
                self._send(STOP)
                self._leave()
        self._leads = False

    def _leave(self) -> None:
        """Leave all groups and drop our own, which waits for its threads: one that outlives Python would abort it."""
        dist.destroy_process_group()
        self._ranks = None


def _moved(value: Any, device: torch.device) -> Any:
    """A value, tuple or dictionary with its tensors moved to a device."""
    if isinstance(value, tuple):
        return tuple(_moved(part, device) for part in value)
    if isinstance(value, dict):
        return {name: _moved(part, device) for name, part in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def join_ranks() -> Any:
    """Join the processes that torchrun has started; returns the group over which calls are sent."""
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        raise UsageError(
            f"load_options {PLAN!r} needs several processes; allowed: torchrun --nproc-per-node N, or no {PLAN}"
        )
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return dist.new_group(backend="gloo", timeout=FOREVER)


def check_heads(source: str, model: Any, ranks: int) -> None:
    """Refuse a number of processes that does not divide the attention heads: each process holds whole heads."""
    config = model.config.get_text_config()
    heads = [getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    counts = [count for count in heads if count]
    if any(count % ranks for count in counts):
        max_ranks = math.gcd(*counts)
        allowed = ", ".join(str(count) for count in range(1, max_ranks + 1) if max_ranks % count == 0)
        raise UsageError(
            f"load_options {PLAN!r}: {ranks} processes, but model {source!r} has {' and '.join(map(str, counts))} "
            f"heads of queries and of keys; allowed: {allowed}"
        )


def loading_options(options: LoadOptions) -> LoadOptions:
    """The options with the plan as transformers takes it. Raises `UsageError` for options that exclude a plan."""
    from transformers.distributed import DistributedConfig

    if options.fast is True:
        raise UsageError(f"fast=True with load_options {PLAN!r}, whose layers are not replaced; allowed: 'auto', False")
    if "device_map" in options.extra:
        raise UsageError(f"load_options device_map together with {PLAN!r}; allowed: one of them")
    extra = {name: value for name, value in options.extra.items() if name != PLAN}
    extra["distributed_config"] = DistributedConfig(tp_plan=options.extra[PLAN])
    return replace(options, fast=False, extra=extra)


def lead_or_follow(model: Any, ranks: Any) -> TensorParallelBackend:
    """The backend on rank 0; on other ranks, follow rank 0 and end the process with it."""
    backend = TensorParallelBackend(model, ranks)
    if backend.cache.states is not None:
        raise UsageError(f"load_options {PLAN!r}: {type(model).__name__} has recurrent layers; allowed: models without")
    if dist.get_rank() != 0:
        backend.follow()
    atexit.register(backend.stop)
    return backend
