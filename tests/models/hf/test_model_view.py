"""A model given by the caller stays unchanged, and changes that the caller makes between calls take effect."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize, prune

import slipstream
from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.errors import UsageError
from slipstream.models.cpu.packed_linear import PackedLinear
from slipstream.models.cpu.quantized_linear import QuantizedLinear
from slipstream.models.hf.model_view import ModelView, unwrapped
from tests.support.markers import mostly_exhaustive
from tests.support.tiny_models import fresh, reference, tokenizer

pytestmark = pytest.mark.slow

PROMPT, COUNT = [5, 9, 11, 5, 9, 11, 5], 12
PARAMS = SamplingParams(max_tokens=COUNT)
LFM2: dict[str, Any] = {
    "tie_word_embeddings": False,
    "layer_types": ["conv", "full_attention"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.4,
}
SMALL: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2}


def recurrent() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = transformers.Lfm2Config(**SMALL, **LFM2, eos_token_id=None, bos_token_id=None, pad_token_id=0)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def decoder_of(model: Any, draft: Any = None, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(model, draft, reproducible=False, **options)


def drop_in_text(model: Any, **options: Any) -> list[int]:
    ids, settings = torch.tensor([PROMPT]), {"do_sample": False, "pad_token_id": 0, "max_new_tokens": COUNT}
    outputs = model.generate(ids, custom_generate=slipstream.custom_generate, **settings, **options)
    return outputs[0, len(PROMPT) :].tolist()


@torch.no_grad()
def load_other(model: Any) -> None:
    generator = torch.Generator().manual_seed(8)
    other = {name: torch.randn(w.shape, generator=generator) / 5 for name, w in model.state_dict().items()}
    model.load_state_dict(other)


def optimizer_step(model: Any) -> None:
    ids = torch.tensor([PROMPT])
    model(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=20.0).step()


def edit_data(model: Any) -> None:
    model.get_output_embeddings().weight.data.neg_()  # PyTorch does not count this write


def edit_row(model: Any) -> None:
    model.get_output_embeddings().weight.data[reference(model, PROMPT, 1)[0]] = 0.0


@torch.no_grad()
def edit_norm(model: Any) -> None:
    model.model.layers[-1].mlp.down_proj.weight.data = -4 * model.model.layers[-1].mlp.down_proj.weight


def replace_parameter(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(-model.lm_head.weight.detach())


def replace_layer(model: Any) -> None:
    model.model.layers[0].mlp = nn.Identity()


def add_hook(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, inputs, output: 9 * output)


def change_attribute(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = 5.0


def resize(model: Any) -> None:
    model.resize_token_embeddings(48, mean_resizing=False)


def cast(model: Any) -> None:
    model.to(torch.float64)
    model.lm_head.weight.data.neg_()


CHANGES: tuple[Callable[[Any], None], ...] = (
    load_other,
    optimizer_step,
    edit_data,
    edit_row,
    edit_norm,
    replace_parameter,
    replace_layer,
    add_hook,
    change_attribute,
    resize,
    cast,
)


@pytest.fixture(params=CHANGES, ids=lambda change: change.__name__)
def change(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], None]]:
    yield request.param


def changed_text(model: Any, change: Callable[[Any], None]) -> list[int]:
    """The text of `generate` after a change, which must differ from the one before, or the test could not fail."""
    before = reference(model, PROMPT, COUNT)
    change(model)
    assert reference(model, PROMPT, COUNT) != before
    return reference(model, PROMPT, COUNT)


def test_a_decoder_follows_the_change(change: Callable[[Any], None]) -> None:
    model = fresh("llama")
    decoder = decoder_of(model)
    assert decoder.generate(PROMPT, PARAMS).token_ids == reference(model, PROMPT, COUNT)
    expected = changed_text(model, change)
    assert decoder.generate(PROMPT, PARAMS).token_ids == expected
    streamed = [token for chunk in decoder.stream(PROMPT, PARAMS) for token in chunk.token_ids]
    assert streamed == expected and decoder.using("ngram").generate(PROMPT, PARAMS).token_ids == expected


@pytest.mark.parametrize("change", [load_other, edit_data, edit_norm, add_hook, replace_layer, cast])
def test_packed_copies_of_weights_follow_the_change(change: Callable[[Any], None]) -> None:
    model = fresh("llama")
    decoder = decoder_of(model, fast=True)
    assert decoder.generate(PROMPT, PARAMS).token_ids == reference(model, PROMPT, COUNT) and decoder.target.packed
    if change is cast:
        with pytest.raises(UsageError, match=r"fast=True, but LlamaForCausalLM cannot be packed: .*float64"):
            decoder.generate(PROMPT, PARAMS) if changed_text(model, change) else None
        return
    expected = changed_text(model, change)
    assert decoder.generate(PROMPT, PARAMS).token_ids == expected


@pytest.mark.parametrize("change", [load_other, optimizer_step, edit_data])
def test_recurrent_layers_follow_the_change(change: Callable[[Any], None]) -> None:
    model = recurrent()
    decoder = decoder_of(model)
    assert decoder.generate(PROMPT, PARAMS).token_ids == drop_in_text(model) == reference(model, PROMPT, COUNT)
    expected = changed_text(model, change)
    assert decoder.generate(PROMPT, PARAMS).token_ids == drop_in_text(model) == expected


@pytest.mark.parametrize("change", mostly_exhaustive(CHANGES, edit_data, add_hook, resize))
def test_custom_generate_follows_the_change(change: Callable[[Any], None]) -> None:
    model = fresh("llama")
    assert drop_in_text(model) == reference(model, PROMPT, COUNT)
    expected = changed_text(model, change)
    assert drop_in_text(model) == expected


@pytest.mark.parametrize("change", [load_other, replace_layer])
def test_logits_and_batches_follow_the_change(change: Callable[[Any], None], tmp_path: Path) -> None:
    model = fresh("llama")
    decoder = decoder_of(model)
    decoder.generate(PROMPT, PARAMS)
    expected = changed_text(model, change)
    assert int(decoder.next_logits(PROMPT).argmax()) == expected[0]
    expected = changed_text(model, edit_data)
    decoder.batch([{"id": "1", "prompt": PROMPT, "max_tokens": COUNT}], tmp_path / "out.jsonl", token_ids=True)
    assert json.loads((tmp_path / "out.jsonl").read_text())["token_ids"] == expected


@pytest.mark.parametrize("fast", [False, True])
def test_a_changed_draft_model_drafts_as_it_is_now(fast: bool) -> None:
    target, draft = fresh("llama"), fresh("llama", seed=1)
    decoder = decoder_of(target, draft, drafter="model", num_draft_tokens=3, fast=fast)
    expected = reference(target, PROMPT, COUNT)
    before = decoder.generate(PROMPT, PARAMS)
    draft.load_state_dict(target.state_dict())
    after = decoder.generate(PROMPT, PARAMS)
    assert before.token_ids == after.token_ids == expected
    assert before.stats.acceptance_rate < 1 == after.stats.acceptance_rate


def test_a_changed_generation_config_takes_effect() -> None:
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(
        transformers.MistralConfig(**SMALL, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.4)
    ).eval()
    decoder = decoder_of(model)
    decoder.generate(PROMPT, PARAMS)
    model.generation_config.eos_token_id = reference(model, PROMPT, 2)[1]
    assert len(decoder.generate(PROMPT, PARAMS).token_ids) <= 2


def test_weights_that_change_during_a_stream_end_it_with_an_error() -> None:
    model = fresh("llama")
    chunks = decoder_of(model, drafter="none").stream(PROMPT, PARAMS)
    next(chunks)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    with pytest.raises(UsageError, match="weights were changed while a text was being written; allowed: before or af"):
        list(chunks)


def test_an_unchanged_model_keeps_its_cached_tokens() -> None:
    model = fresh("llama")
    decoder = decoder_of(model)
    decoder.generate(PROMPT, PARAMS)
    model.train()
    num_read = decoder.num_prefilled_tokens
    assert decoder.generate(PROMPT, PARAMS).token_ids == reference(model.eval(), PROMPT, COUNT)
    assert decoder.num_prefilled_tokens == num_read  # the view has a mode of its own


def test_the_training_mode_of_a_model_is_kept_and_changes_no_text() -> None:
    target, draft = fresh("llama", attention_dropout=0.9).train(), fresh("llama", seed=1).train()
    decoder = decoder_of(target, draft, drafter="model")
    texts = [decoder.generate(PROMPT, PARAMS).token_ids for _ in range(2)]
    assert target.training and draft.training and all(module.training for module in target.modules())
    assert texts == [reference(target.eval(), PROMPT, COUNT)] * 2


@pytest.mark.parametrize("options", [{"fast": True}, {"draft_dtype": "int8"}, {}])
def test_a_model_is_saved_copied_and_cast_as_before(options: dict[str, Any], tmp_path: Path) -> None:
    target, draft = fresh("llama"), fresh("llama", hidden_size=64, intermediate_size=128)
    sizes, texts = [(m.num_parameters(), len(m.state_dict())) for m in (target, draft)], []
    decoder = decoder_of(target, draft, drafter="model", **options)
    packed_types = {type(module) for module in decoder.draft.backend.model.modules()} & {PackedLinear, QuantizedLinear}
    assert bool(packed_types) == bool(options)
    texts.append(decoder.generate(PROMPT, PARAMS).token_ids)
    for number, model in enumerate((target, draft)):
        assert (model.num_parameters(), len(model.state_dict())) == sizes[number]
        assert model.config._attn_implementation == "sdpa"
        assert not any("forward" in vars(module) for module in model.modules())
        model.save_pretrained(tmp_path)
        saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved
        torch.save(model, io.BytesIO())
        ids = torch.tensor([PROMPT])
        assert all(torch.equal(copied(ids).logits, model(ids).logits) for copied in copies)
    second_decoder = decoder_of(target, draft, drafter="model", **options)
    texts.append(second_decoder.generate(PROMPT, PARAMS).token_ids)
    assert texts == [reference(target, PROMPT, COUNT)] * 2
    target.to(torch.bfloat16)
    assert decoder_of(target, fast=True).generate(PROMPT, PARAMS).token_ids == reference(target, PROMPT, COUNT)


def test_recurrent_models_can_be_copied_after_a_call() -> None:
    model = recurrent()
    decoder_of(model).generate(PROMPT, PARAMS)
    drop_in_text(model)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert reference(copied, PROMPT, COUNT) == drop_in_text(copied) == reference(model, PROMPT, COUNT)


def test_a_refused_call_changes_nothing() -> None:
    config = transformers.BertConfig(**SMALL | {"num_hidden_layers": 2, "num_attention_heads": 4}, is_decoder=False)
    model = transformers.BertLMHeadModel(config).eval()
    ids = torch.tensor([PROMPT])
    before, kinds = model(ids).logits, [type(module) for module in model.modules()]
    with pytest.raises(UsageError, match="attends to later tokens"):
        decoder_of(model, fast=True)
    assert torch.equal(model(ids).logits, before) and [type(module) for module in model.modules()] == kinds


class Adapted(nn.Module):
    """A linear layer with a low-rank addition, with which adapters replace a layer."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.is_active = base_layer, True
        self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, base_layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(x)
        if self.is_active:
            result = result + 3 * self.up(self.down(x.to(self.down.weight.dtype)))
        return result


def adapted() -> Any:
    model = fresh("llama")
    with torch.random.fork_rng():
        torch.manual_seed(4)
        for layer in model.model.layers:
            layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
            layer.mlp.up_proj = Adapted(layer.mlp.up_proj)
    return model


@pytest.mark.parametrize("options", [{}, {"fast": True}, {"draft_dtype": "int8"}])
def test_layers_with_adapters_run_and_can_be_switched_off(options: dict[str, Any]) -> None:
    model = adapted()
    decoder = decoder_of(model, adapted(), drafter="model", num_draft_tokens=3, **options)

    def switch_off(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, Adapted):
                module.is_active = False

    assert decoder.generate(PROMPT, PARAMS).token_ids == reference(model, PROMPT, COUNT)
    expected = changed_text(model, switch_off)
    assert decoder.generate(PROMPT, PARAMS).token_ids == expected == reference(fresh("llama"), PROMPT, COUNT)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from PyTorch's compiler when it is imported
@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda model: torch.compile(nn.DataParallel(model))])
def test_wrapped_models_run_as_their_inner_model(wrap: Callable[[Any], Any]) -> None:
    model = fresh("llama")
    expected = reference(model, PROMPT, COUNT)
    decoder = decoder_of(wrap(model), wrap(fresh("llama", seed=1)), drafter="model")
    assert decoder.generate(PROMPT, PARAMS).token_ids == expected and unwrapped(wrap(model)) is model
    assert drop_in_text(model, draft=wrap(fresh("llama", seed=1))) == expected


def test_other_wrappers_are_refused_naming_the_model_inside() -> None:
    wrapper = nn.Module()
    wrapper.policy = nn.Sequential(fresh("llama"))
    with pytest.raises(UsageError, match=r"Module is a wrapper; allowed: the model inside, its \.policy\.0 \(Llama"):
        decoder_of(wrapper)
    with pytest.raises(UsageError, match="model LlamaModel is not supported: it does not generate"):
        decoder_of(fresh("llama").model)


def test_pruned_and_parametrised_layers_follow_the_change() -> None:
    class Negated(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return -weight

    model = fresh("llama")
    decoders = [decoder_of(model, fast=fast) for fast in (False, True)]
    down, head = model.model.layers[0].mlp.down_proj, model.lm_head
    changes: list[Callable[[], Any]] = [
        lambda: prune.l1_unstructured(down, "weight", amount=0.7),
        lambda: prune.remove(down, "weight"),
        lambda: parametrize.register_parametrization(head, "weight", Negated()),
        lambda: parametrize.remove_parametrizations(head, "weight"),
    ]
    for change in changes:
        change()
        expected = reference(model, PROMPT, COUNT)
        assert [decoder.generate(PROMPT, PARAMS).token_ids for decoder in decoders] == [expected] * 2


def test_a_compiled_forward_of_the_caller_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = fresh("llama"), list[None]()
    monkeypatch.setattr(model, "_compiled_call_impl", lambda *inputs, **options: calls.append(None))
    assert decoder_of(model).generate(PROMPT, PARAMS).token_ids == reference(fresh("llama"), PROMPT, COUNT)
    assert not calls


def test_models_without_weights_are_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="its weights are on the meta device, without numbers; allowed: a model whose"):
        decoder_of(fresh("llama").to("meta"))


@pytest.mark.filterwarnings("ignore:You are calling .generate")  # transformers 5.17 warns for any offloaded model
def test_offloaded_weights_are_loaded_when_needed(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="offloads weights")
    expected = reference(fresh("llama"), PROMPT, COUNT)
    model = accelerate.cpu_offload(fresh("llama"))
    assert decoder_of(model).generate(PROMPT, PARAMS).token_ids == drop_in_text(model) == expected
    with pytest.raises(UsageError, match="cannot be packed: some of its weights are loaded only when they"):
        decoder_of(model, fast=True)
    fresh("llama").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    names = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    places = dict.fromkeys(names, "cpu") | {"model.layers.1": "disk"}
    options = {"device_map": places, "offload_folder": str(tmp_path / "rest")}
    decoder = decoder_of(str(tmp_path / "model"), load_options=options)
    assert decoder.generate(PROMPT, PARAMS).token_ids == expected and not decoder.target.packed


@pytest.mark.filterwarnings("ignore")  # from PEFT's own calls
def test_peft_adapters_run_as_targets_and_drafts_and_can_be_switched() -> None:
    peft = pytest.importorskip("peft", reason="the adapters are those of PEFT")
    model = peft.get_peft_model(fresh("llama"), peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False))
    model.eval().add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False))
    decoder = decoder_of(model, model, drafter="model", num_draft_tokens=2, fast=True)

    def check() -> None:
        expected = reference(model.get_base_model(), PROMPT, COUNT)
        assert decoder.generate(PROMPT, PARAMS).token_ids == expected == drop_in_text(model)

    check()
    model.set_adapter("other")
    check()
    model.merge_adapter()
    check()
    model.unmerge_adapter()
    with model.disable_adapter():
        check()
    check()


@pytest.mark.filterwarnings("ignore")  # from PEFT's own calls
def test_prompt_tuning_is_refused_by_name() -> None:
    peft = pytest.importorskip("peft", reason="prompt tuning is PEFT's")
    options = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(fresh("llama"), options).eval()
    with pytest.raises(UsageError, match=r"its adapter \(PromptTuningConfig\) puts virtual tokens before the prompt"):
        decoder_of(model)
    with pytest.raises(UsageError, match="adds 4 virtual tokens, as prompt tuning does"):
        drop_in_text(model)


@pytest.mark.filterwarnings("ignore")  # from PEFT's own calls
def test_adapters_for_each_row_are_refused_by_name() -> None:
    peft = pytest.importorskip("peft", reason="adapter_names is PEFT's")
    model = peft.get_peft_model(fresh("llama"), peft.LoraConfig(task_type="CAUSAL_LM", r=4)).eval()
    ids = torch.tensor([PROMPT, PROMPT])
    with pytest.raises(UsageError, match=r"adapter_names=\['default', 'default'\] cannot be combined with"):
        model.generate(ids, adapter_names=["default"] * 2, custom_generate=slipstream.custom_generate)


def test_a_view_notices_writes_that_pytorch_does_not_count() -> None:
    model = fresh("llama")
    view = ModelView(model)
    for name, weight in model.named_parameters():
        for index in [(0,), (-1,), (..., 0), (..., -1)]:
            original = weight.data[index].clone()
            weight.data[index] = original + 1
            assert not view.has_same_weights(), (name, index)
            weight.data[index] = original
    assert view.has_same_weights() and view.is_same_model()


@pytest.mark.parametrize("options", [{"fast": True}, {"fast": False}, {"draft_dtype": "int8", "drafter": "model"}])
def test_after_forget_a_number_that_was_changed_unseen_counts(options: dict[str, Any]) -> None:
    model, draft = fresh("llama"), fresh("llama", hidden_size=64, intermediate_size=128)
    decoder = decoder_of(model, draft, **{"drafter": "none"} | options)
    decoder.generate(PROMPT, PARAMS)
    changed, name = (draft, "draft") if "draft_dtype" in options else (model, "target")
    weights = changed.lm_head.weight.data
    index = change_unseen(weights, getattr(decoder, name).view)
    decoder.forget()
    assert decoder.generate(PROMPT, PARAMS).token_ids == reference(model, PROMPT, COUNT)
    ids, token = torch.tensor([PROMPT]), index // weights.shape[1]
    logits = [used(ids).logits[0, -1, token] for used in (getattr(decoder, name).view.model, changed)]
    assert logits[1].abs() > 15 and torch.allclose(*logits, rtol=0.3)  # in 8 bits the others of the group are small


def change_unseen(weights: torch.Tensor, view: ModelView) -> int:
    """Change a number that is in no sample of the view; returns which."""
    for index, number in enumerate(weights.flatten().tolist()):
        weights.view(-1)[index] = 50.0
        if view.has_same_weights():
            return index
        weights.view(-1)[index] = number
    raise AssertionError("all numbers are in samples")
