"""The feed-forward block of a mixture of experts, computed by the kernels directly from quantized or plain weights.

`decoder/mixtures.py` declares what each of transformers' blocks computes; transformers' own block, on the same weights,
is the specification. `csrc/blocks/experts.c` computes it: a token's result does not depend on other tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slipstream.errors import SlipstreamError
from slipstream.models.cpu.block_linear import ACTIVATIONS, BlockPart
from slipstream.models.cpu.expert_store import ExpertStore
from slipstream.models.cpu.grouped_blocks import NUMBERS, NotInBlocksError, number_format
from slipstream.models.cpu.huge_pages import HugePages
from slipstream.models.cpu.kernel_libraries import address
from slipstream.models.cpu.structs import (
    INPUTS,
    BlockFormat,
    ExpertMatrixStruct,
    ExpertSetStruct,
    ExpertsStruct,
)
from slipstream.models.decoder.mixtures import experts_plan
from slipstream.models.decoder.plan import ExpertsPlan, UnknownLayerError


@dataclass(frozen=True)
class Stack:
    """One matrix of every expert, in panels."""

    block: BlockFormat
    addresses: list[int]  # of each expert's panels
    parts: list[BlockPart]  # own the panels' memory
    bias: Tensor | None = None  # [experts, outputs] float32
    rows: ctypes.Structure | None = None  # in a file, from which experts are packed when they are needed
    scales: Tensor | None = None  # [experts] float32, each multiplies all weights of an expert; None: 1

    @classmethod
    def of_parts(cls, parts: list[BlockPart], first: int = 0) -> Stack:
        """The matrices that begin at row `first` of these parts, which have the same type."""
        return cls(parts[0].block, [part.from_row(first) for part in parts], parts)

    @classmethod
    def rows_of(cls, part: BlockPart, experts: int, first: int, outputs: int, bias: Tensor | None = None) -> Stack:
        """The matrices [outputs, inputs] that begin at row `first` of each expert's rows in `part`."""
        step = part.outputs // experts
        assert first + outputs <= step
        addresses = [part.from_row(i * step + first) for i in range(experts)]
        return cls(
            part.block, addresses, [part], bias, None, None if part.scale is None else part.scale.repeat(experts)
        )


@dataclass(frozen=True)
class ExpertStacks:
    """The matrices of a block's experts."""

    gate: Stack
    up: Stack
    down: Stack
    store: ExpertStore | None = None  # memory for experts whose matrices have `rows`


class ExpertTensors(Protocol):
    """Holds the tensors of a block of experts, by the names of the model's parameters."""

    def values(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        """A parameter or buffer [shape] in float32."""

    def part(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        """A matrix [shape] for the kernels."""

    def experts(self, block: str, plan: ExpertsPlan, library: Any) -> ExpertStacks:
        """The matrices of the experts of the block with this name."""


class ExpertReads:
    """Counts the experts whose matrices a model's forwards have read, each once per forward and layer."""

    def __init__(self) -> None:
        self._count = ctypes.c_int64(0)
        self.address = ctypes.addressof(self._count)

    @property
    def count(self) -> int:
        return self._count.value


@dataclass(frozen=True)
class ExpertArithmetic:
    """How all expert blocks of a model compute."""

    activations: str  # "int8" or "int15"
    library: Any  # of the kernels
    reads: ExpertReads = field(default_factory=ExpertReads)


class BlockExperts(nn.Module):
    """Replaces a block of experts; computes in float32."""

    def __init__(
        self,
        plan: ExpertsPlan,
        name: str,
        config: Any,
        tensors: ExpertTensors,
        computed: ExpertArithmetic,
    ) -> None:
        """name: in the model; config: of the text model.

        Raises `NotInBlocksError` if the kernels cannot compute this block.
        """
        super().__init__()
        self.plan = plan
        _check_sizes(plan)
        self.activations, self.reads, library = computed.activations, computed.reads, computed.library
        self._library = library
        count, hidden = plan.count, plan.hidden
        stacks = tensors.experts(name, plan, library)
        if plan.expert_scales is not None:
            down, scales = stacks.down, tensors.values(f"{name}.{plan.expert_scales}", (count,))
            stacks = replace(stacks, down=replace(down, scales=scales if down.scales is None else scales * down.scales))
        self.stacks = stacks
        self.router_norm: RouterNorm | None = None
        if plan.router_scale is not None:
            scale = tensors.values(f"{name}.{plan.router_scale}", (hidden,)) * hidden**-0.5
            self.router_norm = RouterNorm(scale, config.rms_norm_eps)
        self._router = numbers_part(tensors.values(f"{name}.{plan.router}.weight", (count, hidden)), library)
        bias = plan.choice_bias
        self._vectors = [
            tensors.values(f"{name}.{plan.router}.bias", (count,)) if plan.is_biased else None,
            tensors.values(f"{name}.{bias}", (1, count) if plan.bias_is_row else (count,)) if bias else None,
            tensors.values(f"{name}.{plan.shared_gate}.weight", (1, hidden)) if plan.shared_gate else None,
        ]
        self._structs: list[Any] = []  # kept: the struct has only their addresses
        self.shared: list[BlockPart] = []
        if plan.shared is not None:
            shapes = {"gate": (plan.shared_inner, hidden), "up": (plan.shared_inner, hidden)}
            self.shared = [
                tensors.part(f"{name}.{plan.shared}.{key}_proj.weight", shape, library)
                for key, shape in (shapes | {"down": (hidden, plan.shared_inner)}).items()
            ]
        shared = ExpertSetStruct()
        if self.shared:
            gate, up, down = (Stack.rows_of(part, 1, 0, part.outputs) for part in self.shared)
            shared = self._set(plan.shared_inner, ExpertStacks(gate, up, down))
        self.struct = ExpertsStruct(
            *(hidden, count, plan.used, ACTIVATIONS[self.activations]),
            self._router.struct,
            *map(address, self._vectors),
            self._set(plan.inner, stacks),
            shared,
            *(plan.groups, plan.used_groups, plan.is_sigmoid, plan.normalizes, plan.floor, plan.factor),
            *(*plan.activation, plan.limit, plan.shift),
            self.reads.address,
        )
        if stacks.store is not None:
            rows = (stack.rows for stack in (stacks.gate, stacks.up, stacks.down))
            layer = stacks.store.layer(count, *(row for row in rows if row is not None))
            self.struct.stored = ctypes.addressof(layer)
        self.chosen = torch.empty(0, plan.used, dtype=torch.int32)
        self._forced: Tensor | None = None

    def _set(self, inner: int, stacks: ExpertStacks) -> ctypes.Structure:
        matrices = []
        for stack in (stacks.gate, stacks.up, stacks.down):
            pointers = (ctypes.c_void_p * len(stack.addresses))(*stack.addresses)
            self._structs.append(pointers)
            vectors = address(stack.bias), address(stack.scales)
            matrices.append(ExpertMatrixStruct(stack.block.code, ctypes.addressof(pointers), *vectors))
        return ExpertSetStruct(inner, *matrices)

    @property
    def formats(self) -> list[str]:
        """The block formats of the experts' matrices."""
        stacks = (self.stacks.gate, self.stacks.up, self.stacks.down)
        return [stack.block.name for stack in stacks] + [part.block.name for part in self.shared]

    @property
    def rounds_activations(self) -> bool:
        """True if any matrix is multiplied by activations that are rounded to integers."""
        return not set(self.formats) <= {block.name for block in NUMBERS.values()}

    def force(self, choice: Tensor | None) -> None:
        """Use these experts [T, used] in forwards of T tokens instead of those that the router chooses.

        The router still weights them. None lets the router choose again.
        """
        if choice is not None:
            choice = choice.to(torch.int32).contiguous()
            ascending = choice.sort(-1).values
            if choice.dim() != 2 or choice.shape[1] != self.plan.used:
                raise ValueError(f"choice: {list(choice.shape)}; allowed: [T, {self.plan.used}]")
            if not bool(((choice >= 0) & (choice < self.plan.count)).all()):
                raise ValueError(f"choice: experts outside 0 to {self.plan.count - 1}; allowed: experts of the block")
            if bool((ascending[:, 1:] == ascending[:, :-1]).any()):
                raise ValueError("choice: the same expert twice for a token; allowed: different experts")
        self._forced = choice
        self.struct.forced, self.struct.num_forced = address(choice), 0 if choice is None else len(choice)

    def check_forced(self, tokens: int) -> None:
        """Raise ValueError if a choice is forced for another number of tokens."""
        if self._forced is not None and len(self._forced) != tokens:
            raise ValueError(f"choice: forced for {len(self._forced)} tokens; allowed: {tokens}, those of this forward")

    def sum_of(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """x: [..., hidden] -> [..., hidden] of the same type. `chosen` keeps which experts were used."""
        rows = x.reshape(-1, self.plan.hidden).float().contiguous()
        of_router = None if routed is None else routed.reshape(rows.shape).float().contiguous()
        self.check_forced(len(rows))
        out, chosen = torch.empty_like(rows), torch.empty(len(rows), self.plan.used, dtype=torch.int32)
        scratch = torch.empty(self._library.experts_scratch(ctypes.byref(self.struct), len(rows)), dtype=torch.uint8)
        arrays = address(chosen), address(out), address(scratch)
        entering = address(rows), address(of_router), len(rows)
        self._library.multiply_experts(ctypes.byref(self.struct), *entering, *arrays)
        if self.stacks.store is not None:
            self.stacks.store.check()
        self.chosen = chosen
        return out.view(x.shape).to(x.dtype)

    def forward(self, hidden_states: Tensor, routed: Tensor | None = None, *others: Any) -> Any:
        """Returns what transformers' block returns for hidden states [..., hidden]. routed: from a `RouterNorm`."""
        result = self.sum_of(hidden_states, routed)
        return (result, None) if self.plan.returns_pair else result

    def extra_repr(self) -> str:
        """Sizes, formats and activations."""
        formats = "+".join(dict.fromkeys(self.formats))
        return f"{self.plan.used} of {self.plan.count} experts, {formats}, {self.activations}"


class RouterNorm(nn.Module):
    """Replaces a router that normalizes its inputs: passes these on to the experts, which then choose by them."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> tuple[None, Tensor, Tensor]:
        """x: [..., hidden]. Returns the normalized inputs in place of both weights and experts."""
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)
        return None, normed, normed


class EmptyExperts(nn.Module):
    """A placeholder for a block of experts in a model without weights."""

    def __init__(self, plan: ExpertsPlan) -> None:
        super().__init__()
        self.plan = plan


def plan_of_block(block: nn.Module, config: Any) -> ExpertsPlan:
    """The plan of a block. Raises `NotInBlocksError` if its class is not declared, or other code changes it."""
    if isinstance(block, EmptyExperts):
        return block.plan
    kind = type(block)
    family = config.model_type.removesuffix("_text")
    if kind.__module__ != f"transformers.models.{family}.modeling_{family}":
        raise NotInBlocksError(f"{kind.__name__} is not a block of experts that the kernels compute")
    if any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in block.modules()):
        raise NotInBlocksError(f"other code changes what {kind.__name__} computes")
    try:
        plan = experts_plan(config)
    except UnknownLayerError as error:
        raise NotInBlocksError(str(error)) from error
    _check_activation(block, plan)
    return plan


def expert_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a model that hold several experts in one tensor, with their names; includes undeclared ones."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, EmptyExperts)
        or (
            isinstance(experts := getattr(module, "experts", None), nn.Module)
            and any(parameter.dim() == 3 for parameter in experts.parameters(recurse=False))
        )
    ]


def replace_experts(model: Any, tensors: Callable[[nn.Module, str], ExpertTensors], computed: ExpertArithmetic) -> None:
    """Replace a model's blocks of experts in place. Raises `NotInBlocksError` if a block must stay.

    tensors: gives those of the block with this name; tensors that transformers has loaded are freed one by one.
    """
    blocks = expert_blocks(model)
    config = model.config.get_text_config()
    plans = [plan_of_block(block, config) for _, block in blocks]  # before the first one is replaced
    for plan in plans:
        name, block = blocks.pop(0)  # drops the list's reference before it is replaced
        experts = BlockExperts(plan, name, config, tensors(block, name), computed)
        if experts.router_norm is not None:  # `block` is the whole layer
            block.experts, block.router = experts, experts.router_norm
            continue
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, experts)
    if plans and hasattr(config, "output_router_logits"):
        config.output_router_logits = False  # for the balancing loss of training, which needs the replaced routers


def experts_of(model: nn.Module) -> list[BlockExperts]:
    """The blocks of experts that the kernels compute."""
    return [module for module in model.modules() if isinstance(module, BlockExperts)]


@contextmanager
def same_choices(experts: Iterable[BlockExperts]) -> Iterator[None]:
    """Inside the block, experts keep their last choice, so that rounding cannot change it."""
    for block in experts:
        block.force(block.chosen)
    try:
        yield
    finally:
        for block in experts:
            block.force(None)


class RecordedChoices:
    """Records which experts each token uses in a first run, and repeats these choices in later runs.

    Later runs may divide the tokens among forwards differently. Layers that the kernels compute as a whole choose
    again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._choices: list[tuple[BlockExperts, list[Tensor]]] = [(block, []) for block in experts_of(model)]
        self._is_recorded = False

    @contextmanager
    def run(self) -> Iterator[None]:
        """Encloses all the forwards of a run."""
        for block, choices in self._choices:
            if not self._is_recorded:
                block.sum_of = partial(self._record, block, choices)  # type: ignore[method-assign]
            elif choices:
                rest = iter(torch.cat(choices))
                block.sum_of = partial(self._repeat, block, rest)  # type: ignore[method-assign]
        try:
            yield
            self._is_recorded = True
        finally:
            for block, _ in self._choices:
                vars(block).pop("sum_of", None)

    def _record(self, block: BlockExperts, choices: list[Tensor], x: Tensor, routed: Tensor | None = None) -> Tensor:
        result = BlockExperts.sum_of(block, x, routed)
        choices.append(block.chosen)
        return result

    def _repeat(self, block: BlockExperts, rest: Iterator[Tensor], x: Tensor, routed: Tensor | None = None) -> Tensor:
        block.force(torch.stack(list(islice(rest, x.shape[:-1].numel()))))
        try:
            return BlockExperts.sum_of(block, x, routed)
        finally:
            block.force(None)


def store_of(model: nn.Module) -> ExpertStore | None:
    """The store into which a model's experts are packed when needed; None if all its weights are in memory."""
    return next((experts.stacks.store for experts in experts_of(model)), None)


class ModelExperts:
    """The blocks of experts of a model, counted together; see `Experts`."""

    def __init__(self, blocks: Sequence[BlockExperts]) -> None:
        self._blocks, struct = blocks, blocks[0].struct
        self.layers, self.count, self.used = len(blocks), struct.count, struct.used

    @classmethod
    def of(cls, model: nn.Module) -> ModelExperts | None:
        """The experts of a model; None if the kernels compute none, or if layers differ in their number."""
        blocks = experts_of(model)
        return cls(blocks) if len({(block.struct.count, block.struct.used) for block in blocks}) == 1 else None

    def num_read(self) -> int:
        return self._blocks[0].reads.count

    def force(self, choice: Tensor | None) -> None:
        for block in self._blocks:
            block.force(choice)


class ModuleTensors:
    """The tensors of a block that transformers has loaded, for `BlockExperts`: as they are, or quantized."""

    def __init__(self, block: nn.Module, name: str, pack: Callable[[Tensor, Any], BlockPart]) -> None:
        """name: of the block in its model; pack: packs a matrix into panels, with the given library."""
        self._block, self._prefix, self._pack = block, f"{name}.", pack

    def _tensor(self, name: str) -> Tensor:
        """A parameter or buffer."""
        parent, _, child = name.removeprefix(self._prefix).rpartition(".")
        tensor = getattr(self._block.get_submodule(parent), child)
        assert isinstance(tensor, Tensor)
        return tensor.detach()

    def values(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._tensor(parameter)
        assert tuple(tensor.shape) == shape
        return tensor.float().contiguous()

    def part(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        return self._pack(self._tensor(parameter), library)

    def experts(self, block: str, plan: ExpertsPlan, library: Any) -> ExpertStacks:
        gate_up, down = (self._tensor(f"{block}.experts.{name}") for name in ("gate_up_proj", "down_proj"))
        count, inner, hidden = plan.count, plan.inner, plan.hidden
        if not hasattr(self._block.experts, "gate_up_proj_bias"):
            part = self._pack(gate_up.flatten(0, 1), library)
            gate, up = (Stack.rows_of(part, count, first, inner) for first in (0, inner))
            return ExpertStacks(gate, up, Stack.rows_of(self._pack(down.flatten(0, 1), library), count, 0, hidden))
        bias = self._tensor(f"{block}.experts.gate_up_proj_bias").float()
        stacks = []
        for place in (0, 1):  # gpt-oss alternates the columns of gates and ups
            part = self._pack(gate_up[..., place::2].transpose(1, 2).flatten(0, 1), library)
            stacks.append(Stack.rows_of(part, count, 0, inner, bias[:, place::2].contiguous()))
        part = self._pack(down.transpose(1, 2).flatten(0, 1), library)
        bias = self._tensor(f"{block}.experts.down_proj_bias").float().contiguous()
        return ExpertStacks(stacks[0], stacks[1], Stack.rows_of(part, count, 0, hidden, bias))


def numbers_part(weight: Tensor, library: Any, memory: HugePages | None = None) -> BlockPart:
    """A floating-point matrix in panels of its type; float32 becomes bfloat16 if that changes no weight."""
    if weight.dtype == torch.float32 and torch.equal(weight.bfloat16().float(), weight):
        weight = weight.bfloat16()

    def rows(first: int, last: int) -> Any:
        return weight[first:last].contiguous().view(torch.uint8).numpy()

    outputs, inputs = weight.shape
    return BlockPart(number_format(weight.dtype, inputs), (outputs, inputs), rows, library, memory)


def stacks_of_single_experts(
    part: Callable[[str, tuple[int, int]], BlockPart], block: str, plan: ExpertsPlan, names: Iterable[str]
) -> ExpertStacks:
    """The matrices of a checkpoint that has a tensor for each matrix of each expert. names: of all its tensors."""
    begins = {
        kind: f"{block}.experts.0.{kind[0]}." for kind in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
    }
    kind = next((kind for kind, begin in begins.items() if any(name.startswith(begin) for name in names)), None)
    if kind is None:
        raise NotInBlocksError(f"the checkpoint has no tensor '{next(iter(begins.values()))}weight'")

    def stack(name: str, outputs: int, inputs: int) -> Stack:
        parts = [part(f"{block}.experts.{i}.{name}.weight", (outputs, inputs)) for i in range(plan.count)]
        if other := next((part for part in parts if part.block != parts[0].block), None):
            raise NotInBlocksError(f"{block} has experts in {parts[0].block.name} and in {other.block.name}")
        return Stack.of_parts(parts)

    gate, up = (stack(name, plan.inner, plan.hidden) for name in kind[:2])
    return ExpertStacks(gate, up, stack(kind[2], plan.hidden, plan.inner))


def _check_sizes(plan: ExpertsPlan) -> None:
    """Raise `NotInBlocksError` where the kernels cannot compute a block, `SlipstreamError` where nothing can."""
    sizes = [plan.inner, plan.hidden] + ([plan.shared_inner] if plan.shared else [])
    if odd := [size for size in sizes if size % INPUTS or not size]:
        raise NotInBlocksError(f"its experts have {odd[0]} inputs; computed with: multiples of {INPUTS}")
    if type(plan.used) is not int or not 1 <= plan.used <= plan.count:
        allowed = f"1 to {plan.count}, its number of experts"
        raise SlipstreamError(f"the configuration has num_experts_per_tok={plan.used!r}; allowed: {allowed}")


def _check_activation(block: Any, plan: ExpertsPlan) -> None:
    experts = block.experts
    (slope, cubic), act = plan.activation, getattr(experts, "act_fn", None)
    if act is None:  # SwiGLU with limits, which older versions do not read from the configuration
        if (experts.alpha, experts.limit) != (slope, plan.limit):
            raise NotInBlocksError(f"its experts have the limit {experts.limit}, its configuration {plan.limit}")
    else:
        x = torch.linspace(-30, 30, 1001)
        if not torch.allclose(x * torch.sigmoid(slope * x + cubic * x**3), act(x.clone()), rtol=1e-5, atol=1e-5):
            name = getattr(act, "__name__", type(act).__name__)
            raise NotInBlocksError(f"the activation {name} is neither SiLU nor GELU by its tanh formula")
