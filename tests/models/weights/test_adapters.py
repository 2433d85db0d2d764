"""PEFT adapter folders: their base model is loaded and they are merged into it, as target and as draft model."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.weights.tokenizer_loading import inspect_vocabulary
from tests.support.tiny_models import fresh, reference, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # from PEFT's own calls
PROMPT, COUNT = [5, 6, 7, 8], 12
PARAMS = SamplingParams(max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base`, a model, and `lora`, an adapter of it."""
    peft = pytest.importorskip("peft", reason="the adapters are those of PEFT")
    path = tmp_path_factory.mktemp("adapters")
    model = fresh("llama")
    model.save_pretrained(path / "base")
    tokenizer().save_pretrained(path / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=32, target_modules=["q_proj", "down_proj"])
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted.save_pretrained(path / "lora")
    settings = json.loads((path / "lora" / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(path / "base")
    (path / "lora" / "adapter_config.json").write_text(json.dumps(settings))
    return path


def merged(folders: Path, dtype: torch.dtype) -> Any:
    import peft

    base = fresh("llama").to(dtype)
    return peft.PeftModel.from_pretrained(base, folders / "lora").merge_and_unload().eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"dtype": "float32", "fast": False}, {"dtype": "float32"}, {"dtype": "bfloat16", "fast": True}],
)
def test_an_adapter_folder_loads_as_the_merged_model(options: dict[str, Any], folders: Path) -> None:
    model = merged(folders, getattr(torch, options["dtype"]))
    expected = reference(model, PROMPT, COUNT)
    assert reference(fresh("llama").to(model.dtype), PROMPT, COUNT) != expected
    lora = str(folders / "lora")
    for draft in (None, lora):
        with SpeculativeDecoder(lora, draft, reproducible=False, num_draft_tokens=2, **options) as decoder:
            assert decoder.generate(PROMPT, PARAMS).token_ids == expected
            assert decoder.tokenizer is not None and decoder.target.name == lora


def test_an_adapters_vocabulary_is_that_of_its_base_model(folders: Path) -> None:
    base, lora = inspect_vocabulary(str(folders / "base")), inspect_vocabulary(str(folders / "lora"))
    assert (lora.name, lora.head_size, lora.end_ids) == (str(folders / "lora"), base.head_size, base.end_ids)
    assert lora.tokenizer is not None and base.tokenizer is not None
    assert lora.tokenizer.vocabulary() == base.tokenizer.vocabulary()


def changed(folders: Path, tmp_path: Path, **settings: Any) -> str:
    """A copy of the adapter with other settings."""
    shutil.copytree(folders / "lora", tmp_path / "lora")
    file = tmp_path / "lora" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return str(tmp_path / "lora")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"base_model_name_or_path": None}, "has base_model_name_or_path=None; allowed: the base model's hub id"),
        ({"base_model_name_or_path": "/no/such/base"}, "model '/no/such/base' is not a folder"),
        ({"r": 8}, r"adapter .* does not fit its base model .*(size mismatch|mismatched)"),
        ({"target_modules": ["no_such_layer"]}, r"adapter .*no_such_layer"),
        ({"target_modules": ["q_proj", "down_proj", "up_proj"]}, "PEFT warns: Found missing adapter keys"),
        ({"target_modules": ["q_proj"]}, r"4 weights of the file are not used, first .*down_proj"),
        ({"new_setting": 3}, r"has new_setting=3, which the installed version of PEFT does not know; allowed"),
        ({"peft_type": "NO_SUCH"}, "does not fit its base model"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_in_one_line(
    settings: dict[str, Any], reason: str, folders: Path, tmp_path: Path
) -> None:
    with pytest.raises(SlipstreamError, match=reason) as refusal:
        SpeculativeDecoder(changed(folders, tmp_path, **settings))
    assert "\n" not in str(refusal.value)


def test_an_adapter_whose_weights_are_not_there_is_refused(folders: Path, tmp_path: Path) -> None:
    folder = changed(folders, tmp_path)
    weights = Path(folder) / "adapter_model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(SlipstreamError, match=r"adapter_model\.safetensors' is only a pointer of Git LFS"):
        SpeculativeDecoder(folder)
    weights.unlink()
    with pytest.raises(SlipstreamError, match=r"^adapter .* has no weights; allowed: a folder with adapter_model"):
        SpeculativeDecoder(folder)


def test_adapters_that_cannot_be_merged_are_refused(folders: Path, tmp_path: Path) -> None:
    import peft

    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(fresh("llama"), prompts)
    model.peft_config["default"].base_model_name_or_path = str(folders / "base")
    model.save_pretrained(tmp_path / "prompts")
    with pytest.raises(UsageError, match=r"puts virtual tokens before the prompt \(PROMPT_TUNING\); allowed"):
        SpeculativeDecoder(str(tmp_path / "prompts"))
    with pytest.raises(UsageError, match=r"quantize='int8', but model .* is an adapter, which is merged first"):
        SpeculativeDecoder(str(folders / "lora"), quantize="int8")


def test_without_peft_an_adapter_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh("llama").save_pretrained(tmp_path / "base")
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "base")}
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(adapter))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SlipstreamError, match=r"is an adapter, which needs peft; run: pip install peft$"):
        SpeculativeDecoder(str(tmp_path / "lora"))


def adapter(folder: Path, tied: bool = True, **settings: Any) -> tuple[str, Any]:
    """An adapter of a tiny model, and PEFT's own model of both. settings: of its `LoraConfig`."""
    peft = pytest.importorskip("peft", reason="the adapters are those of PEFT")
    base, place = fresh("llama", tie_word_embeddings=tied), folder / "adapter"
    base.save_pretrained(folder / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **settings)
    adapted = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(1)
    for weight in adapted.parameters():
        if weight.requires_grad:
            weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    adapted.save_pretrained(place)
    return str(place), adapted.eval()


CHANGED_LAYERS = {
    "embedding": {"target_modules": ["embed_tokens"]},
    "output layer": {"target_modules": ["lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "tied": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "saved output": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]},
    "repeated layers": {"target_modules": ["q_proj", "down_proj"], "layer_replication": [[0, 2], [1, 2]]},
    "magnitudes": {"target_modules": ["embed_tokens"], "use_dora": True},
    "biases": {"target_modules": ["q_proj"], "bias": "all", "use_rslora": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED_LAYERS)
def test_a_merged_adapter_gives_the_text_that_peft_gives(name: str, tmp_path: Path) -> None:
    place, adapted = adapter(tmp_path, **CHANGED_LAYERS[name])
    prompt = [60, 5, 6, 40]
    ids = torch.tensor([prompt])
    expected = adapted.generate(input_ids=ids, do_sample=False, max_new_tokens=COUNT, pad_token_id=0)[0, 4:].tolist()
    for model in (place, adapted):
        options = {"dtype": "float32"} if model is place else {}
        with SpeculativeDecoder(model, reproducible=False, **options) as decoder:
            assert decoder.generate(prompt, PARAMS).token_ids == expected, model


def test_an_adapter_that_peft_merges_in_part_is_refused(tmp_path: Path) -> None:
    place, _ = adapter(tmp_path, target_modules=["lm_head"], trainable_token_indices=[5, 6])
    with pytest.raises(
        SlipstreamError, match=r"PEFT cannot merge it, lm_head stays a \w+; allowed: the PeftModel as an"
    ):
        SpeculativeDecoder(place)


def test_an_adapter_that_changes_only_some_tokens_is_refused(tmp_path: Path) -> None:
    place, adapted = adapter(tmp_path, target_modules=["q_proj"], alora_invocation_tokens=[5, 6])
    with pytest.raises(UsageError, match=r"its adapter \(LoraConfig\) changes only some tokens or texts; allowed"):
        SpeculativeDecoder(adapted)
    with pytest.raises(SlipstreamError, match="aLoRA does not support safe merging"):
        SpeculativeDecoder(place)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('{"base_model_name_or_path": "."}', "base_model_name_or_path='.' leads back to the adapter itself"),
        ('{"base_model_name_or_path": "other"}', "base_model_name_or_path='other' leads back to the adapter itself"),
        ('{"base_model_name_or_path": "/gone"}', "is for a base model that was not loaded: model '/gone' is not a"),
        ('{"base_', r"adapter_config.json is damaged: Unterminated string .* allowed: JSON"),
    ],
)
def test_an_adapter_without_a_usable_base_model_is_refused_by_its_own_name(
    settings: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "adapter_config.json").write_text('{"base_model_name_or_path": "."}')
    (tmp_path / "adapter_config.json").write_text(settings)
    with pytest.raises(SlipstreamError, match=f"adapter '.*{message}"):
        SpeculativeDecoder(str(tmp_path))
