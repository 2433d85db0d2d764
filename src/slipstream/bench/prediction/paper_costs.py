"""The roofline of a machine one does not have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from slipstream.bench.prediction.cost_tables import TokenCosts, is_number
from slipstream.bench.prediction.costs import Costs
from slipstream.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine on paper. memory_bandwidth: bytes/s; flops: FLOP/s of dense matrix products in the weights' precision.

    bytes_per_param: 2 for bf16. launch_ms: the least a forward takes, whatever its size (kernel launches); overhead_ms:
    per round. Use figures the machine reaches, not those of its data sheet, or take the result as a bound.
    """

    memory_bandwidth: float
    flops: float
    bytes_per_param: float = 2.0
    launch_ms: float = 0.0
    overhead_ms: float = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value, least = getattr(self, f.name), "> 0" if f.name[-3:] != "_ms" else ">= 0"
            if not is_number(value) or value < 0 or (value == 0 and least == "> 0"):
                raise UsageError(f"{f.name}={value!r}; allowed: a finite number {least}")

    def forward_ms(self, params: float, tokens: int) -> float:
        """Milliseconds of a forward of `tokens` tokens in all: reading the weights or computing, whichever is longer.

        The roofline (Williams, Waterman and Patterson 2009) with 2 FLOPs per parameter and token (Kaplan et al. 2020,
        section 2.1); attention and the reading of the KV cache are left out.
        """
        reading = params * self.bytes_per_param / self.memory_bandwidth
        computing = 2 * params * tokens / self.flops
        return max(self.launch_ms, 1e3 * max(reading, computing))


def paper_costs(
    target_params: float,
    draft_params: float,
    machine: Machine,
    *,
    batches: Iterable[int] = (1, 2, 4, 8, 16, 32, 64),
    widths: Iterable[int] = range(1, 18),
) -> Costs:
    """Costs of a target and a draft model by the roofline of a machine; draft_params=0 is a free retrieval draft.

    Parameters are the active ones (all of them but in mixtures of experts). Rows are not padded, and a tree costs what
    its tokens cost.
    """
    for name, value, least in (("target_params", target_params, 1), ("draft_params", draft_params, 0)):
        if not is_number(value) or value < least:
            raise UsageError(f"{name}={value!r}; allowed: a finite number >= {least}")
    batches, widths = list(batches), list(widths)
    step = {b: machine.forward_ms(draft_params, b) if draft_params else 0.0 for b in batches}
    overhead = float(machine.overhead_ms)
    tokens = {b: range(b, b * max(widths) + 1) for b in batches}
    flat = TokenCosts(
        {b: {n: machine.forward_ms(target_params, n) for n in tokens[b]} for b in batches},
        {b: dict.fromkeys(tokens[b], overhead) for b in batches},
    )
    return Costs(
        target={b: {w: machine.forward_ms(target_params, b * w) for w in widths} for b in batches},
        overhead={b: {w: overhead for w in widths} for b in batches},
        draft_step=step,
        draft_round=dict.fromkeys(batches, 0.0),
        ragged=flat,
        trees=flat,
        drafter="model" if draft_params else "retrieval",
        machine=f"on paper: {machine.memory_bandwidth / 1e9:g} GB/s, {machine.flops / 1e12:g} TFLOP/s",
    )
