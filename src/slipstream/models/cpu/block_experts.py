"""The feed-forward block of a mixture of experts, computed by the kernels with the weights as they are.

`MIXTURES` declares what each of transformers' blocks computes; transformers' own block, on the same weights, is the
specification. `csrc/blocks/experts.c` computes it: a token's result does not depend on the tokens beside it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slipstream.errors import SlipstreamError
from slipstream.models.cpu.block_linear import ACTIVATIONS, BlockPart
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
from slipstream.models.decoder.plan import GELU, SILU

MAX_TOKENS = 1024  # computed together; scratch space grows with them


@dataclass(frozen=True)
class Mixture:
    """What a block of experts computes. Strings name its children and buffers, or fields of the configuration."""

    router: str = "gate"
    is_sigmoid: bool = False  # scores; else softmax
    normalises: bool | str = True  # divides the scores of the chosen experts by their sum
    floor: float = 0.0  # added to that sum
    factor: str | None = None  # field: what the scores are then multiplied by
    choice_bias: str | None = None  # buffer: added to the scores for the choice only
    shared: str | None = None  # child: the expert that all tokens use
    shared_gate: str | None = None  # child: the linear layer whose sigmoid is the shared expert's factor
    is_gpt_oss: bool = False  # SwiGLU with limits; biases; transposed matrices; a pair is returned


_SOFTMAX = Mixture(normalises="norm_topk_prob")
_GATED = Mixture(normalises="norm_topk_prob", shared="shared_expert", shared_gate="shared_expert_gate")
_GLM = Mixture(
    is_sigmoid=True,
    normalises="norm_topk_prob",
    floor=1e-20,
    factor="routed_scaling_factor",
    choice_bias="gate.e_score_correction_bias",
    shared="shared_experts",
)
_LFM2 = Mixture(
    is_sigmoid=True,
    normalises="norm_topk_prob",
    floor=1e-6,
    factor="routed_scaling_factor",
    choice_bias="expert_bias",
)
# by the name of the block's class in transformers
MIXTURES: Mapping[str, Mixture] = {
    "Qwen2MoeSparseMoeBlock": _GATED,
    "Qwen3MoeSparseMoeBlock": _SOFTMAX,
    "Qwen3NextSparseMoeBlock": _GATED,
    "Qwen3_5MoeSparseMoeBlock": replace(_GATED, normalises=True),
    "OlmoeSparseMoeBlock": _SOFTMAX,
    "MixtralSparseMoeBlock": Mixture(),
    "GraniteMoeMoE": Mixture(router="router"),
    "GptOssMLP": Mixture(router="router", is_gpt_oss=True),
    "Glm4MoeMoE": _GLM,
    "Glm4MoeLiteMoE": _GLM,
    "Lfm2MoeSparseMoeBlock": _LFM2,
}


@dataclass(frozen=True)
class Stack:
    """A matrix of each expert in panels. addresses: where those of each expert begin; parts: keep their memory."""

    block: BlockFormat
    addresses: list[int]
    parts: list[BlockPart]
    bias: Tensor | None = None  # [experts, outputs] float32

    @classmethod
    def rows_of(cls, part: BlockPart, experts: int, first: int, outputs: int, bias: Tensor | None = None) -> Stack:
        """The matrices [outputs, inputs] that begin `first` rows after the beginning of each expert's rows."""
        step = part.outputs // experts
        assert first + outputs <= step
        return cls(part.block, [part.from_row(i * step + first) for i in range(experts)], [part], bias)


@dataclass(frozen=True)
class ExpertStacks:
    """The matrices of a block's experts."""

    gate: Stack
    up: Stack
    down: Stack


@dataclass(frozen=True)
class ExpertSizes:
    """How many experts a block has, and the sizes of their matrices."""

    experts: int
    inner: int
    hidden: int


class ExpertTensors(Protocol):
    """What holds the tensors of a block of experts, by the names of the model's parameters."""

    def values(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        """A parameter or buffer [shape] in float32."""

    def part(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        """A matrix [shape] for the kernels."""

    def experts(self, block: str, sizes: ExpertSizes, library: Any) -> ExpertStacks:
        """The matrices of the experts of the block with this name."""


class ExpertReads:
    """Counts the experts whose matrices a model's forwards have read: those of a forward once in each layer."""

    def __init__(self) -> None:
        self._count = ctypes.c_int64(0)
        self.address = ctypes.addressof(self._count)

    @property
    def count(self) -> int:
        return self._count.value


@dataclass(frozen=True)
class ExpertArithmetic:
    """What the blocks of a model compute with. activations: "int8" or "int15"; library: of the kernels."""

    activations: str
    library: Any
    reads: ExpertReads = field(default_factory=ExpertReads)


class BlockExperts(nn.Module):
    """Computes what a block of experts computes, in float32."""

    def __init__(
        self,
        block: nn.Module,
        name: str,
        config: Any,
        tensors: ExpertTensors,
        computed: ExpertArithmetic,
    ) -> None:
        """block: transformers' own, of which only shapes, settings and the activation are used; name: in the model.

        config: of the text model. Raises `NotInBlocksError` if the kernels cannot compute this block.
        """
        super().__init__()
        form = mixture_of(block)
        self.sizes = sizes = _sizes(block, form)
        self.num_used = _num_used(config, sizes)
        self.activations, self.reads, library = computed.activations, computed.reads, computed.library
        self._library = library
        self._returns_pair = form.is_gpt_oss
        count, hidden = sizes.experts, sizes.hidden
        self.stacks = stacks = tensors.experts(name, sizes, library)
        self._router = numbers_part(tensors.values(f"{name}.{form.router}.weight", (count, hidden)), library)
        self._vectors = [
            tensors.values(f"{name}.{form.router}.bias", (count,)) if form.is_gpt_oss else None,
            _choice_bias(block, form, name, tensors),
            tensors.values(f"{name}.{form.shared_gate}.weight", (1, hidden)) if form.shared_gate else None,
        ]
        self._structs: list[Any] = []  # arrays whose addresses the struct has
        shared = ExpertSetStruct()
        self.shared: list[BlockPart] = []
        if form.shared is not None:
            shared = self._shared(getattr(block, form.shared), f"{name}.{form.shared}", tensors)
        normalises = getattr(config, form.normalises) if isinstance(form.normalises, str) else form.normalises
        self.struct = ExpertsStruct(
            *(hidden, count, self.num_used, ACTIVATIONS[self.activations]),
            self._router.struct,
            *map(address, self._vectors),
            self._set(sizes.inner, stacks),
            shared,
            *(form.is_sigmoid, bool(normalises)),
            *(form.floor, getattr(config, form.factor) if form.factor else 1.0),
            *_activation(block, form, config),
            self.reads.address,
        )
        self.chosen = torch.empty(0, self.num_used, dtype=torch.int32)
        self._forced: Tensor | None = None

    def _set(self, inner: int, stacks: ExpertStacks) -> ExpertSetStruct:
        matrices = []
        for stack in (stacks.gate, stacks.up, stacks.down):
            pointers = (ctypes.c_void_p * len(stack.addresses))(*stack.addresses)
            self._structs.append(pointers)
            matrices.append(ExpertMatrixStruct(stack.block.code, ctypes.addressof(pointers), address(stack.bias)))
        return ExpertSetStruct(inner, *matrices)

    def _shared(self, expert: nn.Module, name: str, tensors: ExpertTensors) -> ExpertSetStruct:
        """The shared expert, whose matrices are those of three linear layers."""
        linears = [(key, getattr(expert, key)) for key in ("gate_proj", "up_proj", "down_proj")]
        self.shared = parts = [
            tensors.part(f"{name}.{key}.weight", (linear.out_features, linear.in_features), self._library)
            for key, linear in linears
        ]
        inner = linears[0][1].out_features
        _check_sizes(inner, self.sizes.hidden)
        stacks = (Stack.rows_of(part, 1, 0, part.outputs) for part in parts)
        return self._set(inner, ExpertStacks(*stacks))

    @property
    def formats(self) -> list[str]:
        """The block formats of the experts' matrices."""
        stacks = (self.stacks.gate, self.stacks.up, self.stacks.down)
        return [stack.block.name for stack in stacks] + [part.block.name for part in self.shared]

    @property
    def rounds_activations(self) -> bool:
        """True if some matrix is multiplied by activations that are rounded to integers."""
        return not set(self.formats) <= {block.name for block in NUMBERS.values()}

    def force(self, choice: Tensor | None) -> None:
        """Use these experts [T, num_used] in forwards of T tokens instead of those that the router chooses.

        Their weights are the router's. None: the router chooses again.
        """
        if choice is not None:
            choice = choice.to(torch.int32).contiguous()
            ascending = choice.sort(-1).values
            if choice.dim() != 2 or choice.shape[1] != self.num_used:
                raise ValueError(f"choice: {list(choice.shape)}; allowed: [T, {self.num_used}]")
            if not bool(((choice >= 0) & (choice < self.sizes.experts)).all()):
                raise ValueError(f"choice: experts beyond 0 to {self.sizes.experts - 1}; allowed: experts of the block")
            if bool((ascending[:, 1:] == ascending[:, :-1]).any()):
                raise ValueError("choice: an expert twice for a token; allowed: different ones")
        self._forced = choice

    def forward(self, hidden_states: Tensor) -> Any:
        """hidden_states: [..., hidden] -> [..., hidden] of the same type. `chosen` keeps which experts were used."""
        x = hidden_states.reshape(-1, self.sizes.hidden).float().contiguous()
        if self._forced is not None and len(self._forced) != len(x):
            raise ValueError(f"choice: forced for {len(self._forced)} tokens; allowed: {len(x)}, those of this forward")
        out, chosen = torch.empty_like(x), torch.empty(len(x), self.num_used, dtype=torch.int32)
        for first in range(0, len(x), MAX_TOKENS):
            part = slice(first, first + MAX_TOKENS)
            count = len(x[part])
            scratch = torch.empty(self._library.experts_scratch(ctypes.byref(self.struct), count), dtype=torch.uint8)
            forced = address(None if self._forced is None else self._forced[part])
            arrays = forced, address(chosen[part]), address(out[part]), address(scratch)
            self._library.multiply_experts(ctypes.byref(self.struct), address(x[part]), count, *arrays)
        self.chosen = chosen
        result = out.view(hidden_states.shape).to(hidden_states.dtype)
        return (result, None) if self._returns_pair else result

    def extra_repr(self) -> str:
        """Sizes, formats and activations."""
        formats = "+".join(dict.fromkeys(self.formats))
        return f"{self.num_used} of {self.sizes}, {formats}, {self.activations}"


def mixture_of(block: nn.Module) -> Mixture:
    """What a block computes. Raises `NotInBlocksError` if it is none that is declared, or does more."""
    kind = type(block)
    form = MIXTURES.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None
    if form is None:
        raise NotInBlocksError(f"{kind.__name__} is no block of experts that the kernels compute")
    if any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in block.modules()):
        raise NotInBlocksError(f"other code changes what {kind.__name__} computes")
    return form


def expert_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a model that hold several experts in one tensor, with their names; also those not declared."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if any(parameter.dim() == 3 for parameter in _parameters(getattr(module, "experts", None)))
    ]


def replace_experts(model: Any, tensors: Callable[[nn.Module, str], ExpertTensors], computed: ExpertArithmetic) -> None:
    """Replace a model's blocks of experts in place. Raises `NotInBlocksError` if a block must stay.

    tensors: those of a block of this name; those that transformers has loaded are freed one by one.
    """
    blocks = expert_blocks(model)
    config = model.config.get_text_config()
    for _, block in blocks:
        mixture_of(block)  # before the first one is replaced
    has_blocks = bool(blocks)
    while blocks:
        name, block = blocks.pop(0)  # so that nothing holds it when it is replaced
        experts = BlockExperts(block, name, config, tensors(block, name), computed)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, experts)
    if has_blocks and hasattr(config, "output_router_logits"):
        config.output_router_logits = False  # for the balancing loss of training, which needs the replaced routers


def experts_of(model: nn.Module) -> list[BlockExperts]:
    """The blocks of experts that the kernels compute."""
    return [module for module in model.modules() if isinstance(module, BlockExperts)]


class ModelExperts:
    """The blocks of experts of a model, counted together; see `Experts`."""

    def __init__(self, blocks: Sequence[BlockExperts]) -> None:
        self._blocks, struct = blocks, blocks[0].struct
        self.layers, self.count, self.used = len(blocks), struct.count, struct.used

    @classmethod
    def of(cls, model: nn.Module) -> ModelExperts | None:
        """Those of a model; None if it has none that the kernels compute, or layers differ in their number."""
        blocks = experts_of(model)
        return cls(blocks) if len({(block.struct.count, block.struct.used) for block in blocks}) == 1 else None

    def num_read(self) -> int:
        return self._blocks[0].reads.count

    def force(self, choice: Tensor | None) -> None:
        for block in self._blocks:
            block.force(choice)


class ModuleTensors:
    """The tensors of a block that transformers has loaded, for `BlockExperts`: as they are, or quantised."""

    def __init__(self, block: nn.Module, name: str, pack: Callable[[Tensor, Any], BlockPart]) -> None:
        """name: of the block in its model; pack: makes panels of a matrix, with this library."""
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

    def experts(self, block: str, sizes: ExpertSizes, library: Any) -> ExpertStacks:
        gate_up, down = (self._tensor(f"{block}.experts.{name}") for name in ("gate_up_proj", "down_proj"))
        count, inner, hidden = sizes.experts, sizes.inner, sizes.hidden
        if not hasattr(self._block.experts, "gate_up_proj_bias"):
            part = self._pack(gate_up.flatten(0, 1), library)
            gate, up = (Stack.rows_of(part, count, first, inner) for first in (0, inner))
            return ExpertStacks(gate, up, Stack.rows_of(self._pack(down.flatten(0, 1), library), count, 0, hidden))
        bias = self._tensor(f"{block}.experts.gate_up_proj_bias").float()
        stacks = []
        for place in (0, 1):  # of gpt-oss, whose columns alternate
            part = self._pack(gate_up[..., place::2].transpose(1, 2).flatten(0, 1), library)
            stacks.append(Stack.rows_of(part, count, 0, inner, bias[:, place::2].contiguous()))
        part = self._pack(down.transpose(1, 2).flatten(0, 1), library)
        bias = self._tensor(f"{block}.experts.down_proj_bias").float().contiguous()
        return ExpertStacks(stacks[0], stacks[1], Stack.rows_of(part, count, 0, hidden, bias))


def numbers_part(weight: Tensor, library: Any, memory: HugePages | None = None) -> BlockPart:
    """A matrix in floating point as panels of its own numbers: of bfloat16 ones where float32 holds no others."""
    if weight.dtype == torch.float32 and torch.equal(weight.bfloat16().float(), weight):
        weight = weight.bfloat16()

    def rows(first: int, last: int) -> Any:
        return weight[first:last].contiguous().view(torch.uint8).numpy()

    outputs, inputs = weight.shape
    return BlockPart(number_format(weight.dtype, inputs), (outputs, inputs), rows, library, memory)


def stacks_of_single_experts(
    part: Callable[[str, tuple[int, int]], BlockPart], block: str, sizes: ExpertSizes, names: Iterable[str]
) -> ExpertStacks:
    """The matrices of a checkpoint that has a tensor for each matrix of each expert. names: of all its tensors."""
    prefix = f"{block}.experts.0.gate_proj."
    if not any(name.startswith(prefix) for name in names):
        raise NotInBlocksError(f"the checkpoint has no tensor '{prefix}weight'")

    def stack(name: str, outputs: int, inputs: int) -> Stack:
        parts = [part(f"{block}.experts.{i}.{name}.weight", (outputs, inputs)) for i in range(sizes.experts)]
        if other := next((part for part in parts if part.block != parts[0].block), None):
            raise NotInBlocksError(f"{block} has experts in {parts[0].block.name} and in {other.block.name}")
        return Stack(parts[0].block, [part.from_row(0) for part in parts], parts)

    gate, up = (stack(name, sizes.inner, sizes.hidden) for name in ("gate_proj", "up_proj"))
    return ExpertStacks(gate, up, stack("down_proj", sizes.hidden, sizes.inner))


def _parameters(module: Any) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=False) if isinstance(module, nn.Module) else iter(())


def _sizes(block: nn.Module, form: Mixture) -> ExpertSizes:
    experts: Any = block.experts
    count, first, second = experts.down_proj.shape
    hidden, inner = (second, first) if form.is_gpt_oss else (first, second)
    _check_sizes(inner, hidden)
    return ExpertSizes(count, inner, hidden)


def _check_sizes(inner: int, hidden: int) -> None:
    if odd := [size for size in (inner, hidden) if size % INPUTS or not size]:
        raise NotInBlocksError(f"its experts have {odd[0]} inputs; computed with: multiples of {INPUTS}")


def _num_used(config: Any, sizes: ExpertSizes) -> int:
    """How many experts a token uses."""
    used, name = config.num_experts_per_tok, "num_experts_per_tok"
    if type(used) is not int or not 1 <= used <= sizes.experts:
        raise SlipstreamError(
            f"the configuration has {name}={used!r}; allowed: 1 to {sizes.experts}, its number of experts"
        )
    groups, used_groups = getattr(config, "n_group", 1) or 1, getattr(config, "topk_group", 1) or 1
    if used_groups < groups:
        raise NotInBlocksError(f"its router chooses {used_groups} of {groups} groups of experts first")
    return used


def _choice_bias(block: nn.Module, form: Mixture, name: str, tensors: ExpertTensors) -> Tensor | None:
    if form.choice_bias is None:
        return None
    parent, _, child = form.choice_bias.rpartition(".")
    bias = getattr(block.get_submodule(parent), child, None)
    return None if bias is None else tensors.values(f"{name}.{form.choice_bias}", tuple(bias.shape))


def _activation(block: nn.Module, form: Mixture, config: Any) -> tuple[float, float, float, float]:
    """Slope, cubic term, limit and shift, see `struct experts`."""
    experts: Any = block.experts
    if form.is_gpt_oss:
        return experts.alpha, 0.0, experts.limit, 1.0
    x = torch.linspace(-30, 30, 1001)
    expected = experts.act_fn(x.clone())
    for slope, cubic in (SILU, GELU):
        if torch.allclose(x * torch.sigmoid(slope * x + cubic * x**3), expected, rtol=1e-5, atol=1e-5):
            return slope, cubic, math.inf, 0.0
    name = getattr(experts.act_fn, "__name__", type(experts.act_fn).__name__)
    raise NotInBlocksError(f"the activation {name} is neither SiLU nor GELU by its tanh formula")
