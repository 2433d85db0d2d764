"""Blocks of experts: transformers' own numbers, and the same bits whatever is computed beside a token and by whom."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.cpu.block_experts import (
    BlockExperts,
    ExpertArithmetic,
    ExpertStacks,
    ModuleTensors,
    RecordedChoices,
    Stack,
    experts_of,
    numbers_part,
    plan_of_block,
    replace_experts,
)
from slipstream.models.cpu.block_linear import BlockLinear, BlockPart
from slipstream.models.cpu.grouped_blocks import NUMBERS, NotInBlocksError
from slipstream.models.cpu.kernel_libraries import block_recipe, kernels, loaded
from slipstream.models.cpu.processor import FORCED_ONLY, NEEDED, processor
from slipstream.models.cpu.quantized_linear import FORMATS, quantized_part
from slipstream.models.decoder.plan import ExpertsPlan
from slipstream.models.hf import trials
from slipstream.models.hf.fast_forwards import _multiplies_tokens_independently
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.weights.gguf_configuration import described
from slipstream.models.weights.gguf_conversion import dequantized
from slipstream.models.weights.gguf_file import read_header
from tests.support.gguf_architectures import CASES, architecture, write_case
from tests.support.gguf_files import BY_NAME, part_of, random_blocks
from tests.support.markers import needs_kernels
from tests.support.mixtures import FAMILIES, assert_drafts_change_no_text, block_of, mixture

pytestmark = needs_kernels
HERE = [name for name, flags in NEEDED.items() if set(flags) <= processor().flags]
TOKENS = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) * 3


def in_kernels(model: Any, pack: Any = numbers_part) -> BlockExperts:
    name, block = block_of(model)
    computed = ExpertArithmetic("int8", loaded(block_recipe(HERE[0])))
    config = model.config.get_text_config()
    return BlockExperts(plan_of_block(block, config), name, config, ModuleTensors(block, name, pack), computed)


def hidden(result: Any) -> Tensor:
    """What a block returns, which for gpt-oss is the first of a pair."""
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.slow
@pytest.mark.each_value
@torch.inference_mode()
@pytest.mark.parametrize("inner", [96, 32])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_computes_what_transformers_does(family: str, inner: int) -> None:
    model = mixture(family, experts_implementation="eager", moe_intermediate_size=inner, intermediate_size=inner)
    x = TOKENS[:13, :64].view(1, 13, 64)
    expected, experts = hidden(block_of(model)[1](x)), in_kernels(model)
    computed = hidden(experts(x))
    assert (computed - expected).square().mean().sqrt() <= 1e-6 * expected.square().mean().sqrt()
    assert torch.equal(torch.cat([hidden(experts(x[:, i : i + 1])) for i in range(13)], 1), computed)
    assert experts.rounds_activations is False and experts(x.bfloat16()[:, :1])[0].dtype == torch.bfloat16


class RandomTensors:
    """The tensors of a block of which all matrices have random blocks of some types, the same for every library."""

    def __init__(self, kinds: tuple[str, str, str], order: list[int]) -> None:
        """kinds: of gates, ups and downs; order: the expert of this file that each expert of the block is."""
        self.kinds, self.order = kinds, order

    def values(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(len(parameter))) * 0.2
        return values[self.order].contiguous() if shape[0] == len(self.order) else values

    def part(self, parameter: str, shape: tuple[int, int], library: Any, kind: str = "Q8_0") -> BlockPart:
        seed = sum(parameter.encode())
        dtype = {block.name: dtype for dtype, block in NUMBERS.items()}.get(kind)
        if kind != "int4" and dtype is None:
            return part_of(BY_NAME[kind], random_blocks(BY_NAME[kind], *shape, seed, 0.001), shape[1], library)
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1
        return quantized_part(weight, library, "int4") if dtype is None else numbers_part(weight.to(dtype), library)

    def experts(self, block: str, plan: ExpertsPlan, library: Any) -> ExpertStacks:
        shapes = {"gate": (plan.inner, plan.hidden), "up": (plan.inner, plan.hidden)}
        shapes["down"] = plan.hidden, plan.inner
        stacks = []
        for (name, shape), kind in zip(shapes.items(), self.kinds, strict=True):
            parts = [self.part(f"{name}{expert}", shape, library, kind) for expert in self.order]
            bias = self.values(f"{name} bias", (plan.count, shape[0]))
            stacks.append(Stack(parts[0].block, [part.from_row(0) for part in parts], parts, bias))
        return ExpertStacks(*stacks)


@cache
def of_blocks(
    kinds: tuple[str, str, str], activations: str, isa: str, order: tuple[int, ...] = tuple(range(8))
) -> BlockExperts:
    """A block with a shared expert, of which each token uses three of eight experts."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 96}
    model = mixture("qwen2_moe", **sizes)
    name, block = block_of(model)
    computed = ExpertArithmetic(activations, loaded(block_recipe(isa)))
    plan = plan_of_block(block, model.config)
    return BlockExperts(plan, name, model.config, RandomTensors(kinds, list(order)), computed)


MIXED = [
    (("Q4_K", "Q4_K", "Q6_K"), "int8"),
    (("Q5_0", "Q4_0", "Q8_0"), "int15"),
    (("BF16", "BF16", "BF16"), "int8"),
    (("F16", "Q5_K", "F32"), "int8"),
    (("int4", "int4", "Q5_1"), "int8"),
    (("Q2_K", "TQ2_0", "Q3_K"), "int8"),
]


@pytest.mark.each_value
@pytest.mark.parametrize(("kinds", "activations"), MIXED, ids=str)
def test_a_token_gets_the_same_bits_at_every_width_and_with_any_number_of_threads(
    kinds: tuple[str, str, str], activations: str
) -> None:
    experts = of_blocks(kinds, activations, HERE[0])
    whole = experts(TOKENS)
    assert whole.isfinite().all() and not torch.equal(whole[0], whole[1])
    chosen = experts.chosen
    assert len({tuple(row) for row in chosen.tolist()}) > 8 and chosen[:, 0].max() > chosen[:, 2].min()
    for threads, widths in ((1, range(1, 65)), (2, (1, 2, 7, 8, 9, 17, 64)), (3, (1, 5, 40)), (4, (3, 16, 33))):
        torch.set_num_threads(threads)
        for width in widths:
            assert torch.equal(experts(TOKENS[:width]), whole[:width]), (threads, width)
            last = experts(TOKENS[-width:].view(1, width, -1))
            assert torch.equal(last[0], whole[-width:]) and torch.equal(experts.chosen, chosen[-width:])
    many = TOKENS.repeat(17, 1)  # more than are computed together
    assert torch.equal(experts(many), whole.repeat(17, 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kinds", "activations"), MIXED, ids=str)
@pytest.mark.parametrize("isa", [name for name in HERE[1:] if name not in FORCED_ONLY or name == "plain"])
def test_all_instructions_give_the_same_bits(isa: str, kinds: tuple[str, str, str], activations: str) -> None:
    other, best = of_blocks(kinds, activations, isa), of_blocks(kinds, activations, HERE[0])
    for width in (1, 13):
        assert torch.equal(other(TOKENS[:width]), best(TOKENS[:width]))


def test_experts_are_added_in_the_order_of_their_numbers() -> None:
    """The same experts under other numbers are added in another order, which rounds otherwise."""
    kinds, order = ("Q8_0",) * 3, (6, 3, 7, 0, 5, 1, 4, 2)
    experts, renumbered = of_blocks(kinds, "int8", HERE[0]), of_blocks(kinds, "int8", HERE[0], order)
    out, other = experts(TOKENS), renumbered(TOKENS)
    again = torch.tensor(order)[renumbered.chosen.long()].sort(-1).values
    assert torch.equal(again, experts.chosen.long())
    assert torch.allclose(out, other, rtol=1e-4, atol=1e-4) and not torch.equal(out, other)


def test_of_equal_logits_the_smaller_number_is_chosen() -> None:
    model = mixture("qwen3_moe")
    _, block = block_of(model)
    router: Any = block.gate
    router.weight.data[1::2] = router.weight.data[::2]  # experts 2 i and 2 i + 1 are equally likely
    x = TOKENS[:32, :64].contiguous()
    experts = in_kernels(model)
    out, chosen = experts(x), experts.chosen.clone()
    pairs = [sorted(expert // 2 for expert in row) for row in chosen.tolist()]
    assert all(len(set(pair)) == 2 for pair in pairs)  # a whole pair, and the smaller one of another
    alone = [row[0] if row[1] // 2 == row[2] // 2 else row[2] for row in chosen.tolist()]
    assert all(expert % 2 == 0 for expert in alone)
    larger = chosen.clone()
    larger[range(32), [row.index(expert) for row, expert in zip(chosen.tolist(), alone, strict=True)]] += 1
    experts.force(larger)
    assert not torch.equal(experts(x), out)


def test_a_trial_of_a_layer_compares_the_same_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rounding may choose another expert; that is not an error of the layer that is tried."""
    model = mixture("qwen3_moe", num_experts=64, num_local_experts=64, num_experts_per_tok=8)
    router: Any = block_of(model)[1].gate
    router.weight.data *= 0.05  # so that no expert outweighs the others
    experts, x = in_kernels(model), TOKENS[:, :64].contiguous()
    rounded = x * (1 + 0.004 * torch.randn(x.shape, generator=torch.Generator().manual_seed(6)))
    trial = trials.Trial(experts, lambda h: h + 100 * experts(h), lambda h: h + 100 * experts(rounded))
    assert torch.equal(trial(x), x + 100 * experts(x)) and trial.error < 0.02
    monkeypatch.setattr(trials, "same_choices", lambda _: nullcontext())
    trial(x)
    assert trial.error > 0.02


def test_later_runs_of_forwards_use_the_same_experts() -> None:
    """However their tokens are divided, though a rounding would have chosen others."""
    experts, x = in_kernels(mixture("qwen3_moe")), TOKENS[:12, :64].contiguous()
    choices, computed = RecordedChoices(experts), list[torch.Tensor]()
    for rows in ((x[:5], x[5:]), (-x[:7], -x[7:]), (x,)):
        with choices.run():
            for part in rows:
                experts(part)
                computed.append(experts.chosen)
    first, negated, last = torch.cat(computed[:2]), torch.cat(computed[2:4]), computed[4]
    assert torch.equal(negated, first) and torch.equal(last, first)
    experts(-x)
    assert not torch.equal(experts.chosen, first)


def test_a_forced_choice_is_used_and_counted() -> None:
    model = mixture("qwen3_moe")
    experts, x = in_kernels(model), TOKENS[:5, :64].contiguous()
    out = experts(x)
    before, distinct = experts.reads.count, len(set(experts.chosen.flatten().tolist()))
    experts.force(experts.chosen.flip(1))
    assert torch.equal(experts(x), out) and experts.reads.count - before == distinct
    choice = torch.tensor([[0, 1, 2], [2, 1, 0], [0, 1, 2], [7, 0, 1], [0, 1, 2]])
    experts.force(choice)
    before = experts.reads.count
    assert experts(x).isfinite().all() and experts.reads.count - before == 4
    assert experts.chosen.tolist() == choice.sort(-1).values.tolist()
    with pytest.raises(ValueError, match="forced for 5 tokens"):
        experts(x[:2])
    for wrong in ([[0, 1]], [[0, 1, 8]], [[-1, 1, 2]], [[1, 1, 2]]):
        with pytest.raises(ValueError, match="choice"):
            experts.force(torch.tensor(wrong))
    experts.force(None)
    assert torch.equal(experts(x), out)


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "glm4_moe", "gpt_oss"])
def test_nan_and_infinite_numbers_of_a_token_reach_its_result_and_no_other(family: str) -> None:
    experts, x = in_kernels(mixture(family)), TOKENS[:6, :64].contiguous()
    expected = hidden(experts(x))
    x[2, 5], x[4, 7] = torch.nan, torch.inf
    out = hidden(experts(x))
    assert out[[2, 4]].isnan().all() and torch.equal(out[[0, 1, 3, 5]], expected[[0, 1, 3, 5]])
    broken = mixture(family)
    router: Any = getattr(block_of(broken)[1], "router" if family == "gpt_oss" else "gate")
    router.weight.data[3, 3] = torch.nan
    assert hidden(in_kernels(broken)(x)).isnan().all()


@pytest.mark.parametrize("used", [0, 9, -1])
def test_more_experts_than_there_are_and_none_are_refused(used: int) -> None:
    with pytest.raises(SlipstreamError, match=f"num_experts_per_tok={used}; allowed: 1 to 8"):
        in_kernels(mixture("qwen3_moe", num_experts_per_tok=used))


def test_a_mixture_without_experts_is_refused() -> None:
    with pytest.raises(SlipstreamError, match="num_experts_per_tok=3; allowed: 1 to 0"):
        in_kernels(mixture("mixtral", num_local_experts=0, num_experts=0))


def _with_hook(model: Any) -> None:
    block_of(model)[1].register_forward_hook(lambda *_: None)


def _with_activation(model: Any) -> None:
    experts: Any = block_of(model)[1].experts
    experts.act_fn = nn.ReLU()


def _of_another_class(model: Any) -> None:
    _, block = block_of(model)
    block.__class__ = type("OwnBlock", (type(block),), {})


@pytest.mark.parametrize(
    ("family", "changes", "change", "reason"),
    [
        ("qwen3_moe", {}, _with_hook, "other code changes"),
        ("qwen3_moe", {}, _with_activation, "neither SiLU nor GELU"),
        ("qwen3_moe", {}, _of_another_class, "OwnBlock is not a block of experts"),
        ("qwen3_moe", {"moe_intermediate_size": 48}, None, "48 inputs; computed with: multiples of 32"),
        ("glm4_moe", {"n_group": 8, "topk_group": 2}, None, "chooses 3 of 8 experts from 2 of 8 groups"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, None, "chooses experts by 'noaux_tc'"),
    ],
)
def test_what_is_not_declared_keeps_transformers_block(
    family: str, changes: dict[str, Any], change: Any, reason: str
) -> None:
    model = mixture(family, **changes)
    if change is not None:
        change(model)
    computed = ExpertArithmetic("int8", loaded(block_recipe(HERE[0])))
    with pytest.raises(NotInBlocksError, match=reason):
        replace_experts(model, lambda block, name: ModuleTensors(block, name, numbers_part), computed)
    assert not experts_of(model)


def test_a_router_that_is_a_bare_parameter_multiplies_tokens_together() -> None:
    """Its product depends on how many tokens there are, so such a model's forwards are not all alike."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 64))

    class Model(nn.Module):
        def __init__(self, *modules: nn.Module) -> None:
            super().__init__()
            part = part_of(BY_NAME["Q8_0"], random_blocks(BY_NAME["Q8_0"], 32, 64, 1), 64, kernels())
            self.embedding, self.head, self.others = nn.Embedding(8, 64), BlockLinear([part], None, "int8"), modules
            for index, module in enumerate(modules):
                self.add_module(str(index), module)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    def are_independent(*modules: nn.Module, layers: Sequence[nn.Module] = ()) -> bool:
        model = Model(*modules)
        return _multiplies_tokens_independently(model, model.head, layers)

    assert are_independent(nn.LayerNorm(64), in_kernels(mixture("qwen3_moe")))
    assert not are_independent(Router())
    assert not are_independent(block_of(mixture("qwen3_moe"))[1])
    layer = Router()  # of a compiled layer, the kernels compute everything
    assert are_independent(layer, layers=[layer])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny mixture in bfloat16."""
    path = tmp_path_factory.mktemp("mixture")
    mixture("qwen3_moe", torch.bfloat16, output_router_logits=True).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("dtype", ["auto", "float16", "float32"])
def test_the_experts_of_a_checkpoint_keep_their_numbers(folder: str, dtype: str) -> None:
    loaded = load(folder, LoadOptions(dtype=dtype))
    experts = experts_of(loaded.model)
    assert len(experts) == 2 and set(experts[0].formats) == {{"auto": "BF16", "float16": "F16"}.get(dtype, "BF16")}
    loaded.backend.reserve(1, 64)
    ids = torch.randint(3, 250, (1, 30), generator=torch.Generator().manual_seed(2))
    logits = loaded.backend.forward(ids, [0], first_slot=0, logits=True).float()
    expected = mixture("qwen3_moe", torch.bfloat16).float()(input_ids=ids).logits
    assert (logits - expected).square().mean().sqrt() < 0.1 * expected.std()
    assert experts[0].reads is experts[1].reads and experts[0].reads.count >= 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_a_mixture_is_quantized_while_it_is_loaded(folder: str, quantize: str) -> None:
    loaded = load(folder, LoadOptions(rounding=quantize, activations="int15"))
    (block, _) = experts_of(loaded.model)
    assert block.stacks.gate.block == FORMATS[4 if quantize == "int4" else 8] and block.activations == "int15"
    assert loaded.arithmetic.endswith("blocks, int15 activations")
    if quantize == "int4":  # decoder/test_mixtures.py tries checkpoints and files
        assert_drafts_change_no_text(folder, quantize=quantize)


def test_a_mixture_whose_tensors_have_other_names_is_not_quantized(tmp_path: Path) -> None:
    mixture("mixtral", torch.bfloat16).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name.replace(".w1.", ".w.").replace(".w3.", ".v."): t for name, t in load_file(file).items()}, file)
    with pytest.raises(UsageError, match=r"is a mixture of experts: the checkpoint has no tensor .*; allowed: 'none'"):
        load(str(tmp_path), LoadOptions(rounding="int4"))


@pytest.mark.parametrize("name", ["qwen3moe", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_a_gguf_mixture_is_computed_in_its_own_blocks(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file, case = tmp_path / "mixture.gguf", CASES[name]
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    write_case(file, architecture(name), replace(case, settings=case.settings | sizes), "Q4_K")
    loaded = load(str(file), LoadOptions(activations="int15"))
    assert loaded.arithmetic == "Q4_K blocks, int15 activations"
    assert {kind for block in experts_of(loaded.model) for kind in block.formats} == {"Q4_K"}
    header = read_header(file)
    reference = dequantized(header, described(header), torch.float32).eval()
    loaded.backend.reserve(1, 64)
    ids = torch.randint(3, 250, (1, 30), generator=torch.Generator().manual_seed(2))
    logits, expected = loaded.backend.forward(ids, [0], first_slot=0, logits=True), reference(input_ids=ids).logits
    assert (logits - expected).square().mean().sqrt() < 0.01 * expected.std()
