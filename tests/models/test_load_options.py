"""Load options reach every file of the model they name, and nothing else; no repository's code runs unasked."""

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder, UsageError
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.weights.tokenizer_loading import inspect_vocabulary
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from tests.support.tiny_models import fresh, prompts, reference, shared, tokenizer

PARAMS = SamplingParams(max_tokens=12)
PROMPT = prompts([9])[0]
OTHER_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
LOADING: dict[str, Any] = {"dtype": "float32", "device": "cpu", "reproducible": False}

OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class OwnConfig(LlamaConfig):
    model_type = "of_its_own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
OWN_CONFIG = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the hub: `org/name` with revisions main and v2, `org/draft` with main only."""
    cache = tmp_path_factory.mktemp("hub")
    for repository, revision, seed, template in (
        ("name", "main", 0, None),
        ("name", "v2", 5, OTHER_TEMPLATE),
        ("draft", "main", 0, None),
    ):
        commit = f"{seed}{repository}".encode().hex().ljust(40, "0")
        folder = cache / f"models--org--{repository}"
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / revision).write_text(commit)
        model_of_seed(seed).save_pretrained(folder / "snapshots" / commit)
        tokenizer(template=template).save_pretrained(folder / "snapshots" / commit)
    return cache


def model_of_seed(seed: int) -> Any:
    return fresh("llama", seed, intermediate_size=64)


def options_for(cache: Path, **options: Any) -> dict[str, Any]:
    return LOADING | {"load_options": {"cache_dir": str(cache), **options}}


def snapshot(hub: Path, revision: str) -> str:
    """The folder of a revision of org/name."""
    repository = hub / "models--org--name"
    return str(repository / "snapshots" / (repository / "refs" / revision).read_text())


def template_of(decoder: SpeculativeDecoder) -> str | None:
    assert isinstance(decoder.tokenizer, HFTokenizer)
    template: str | None = decoder.tokenizer.inner.chat_template
    return template


@pytest.mark.parametrize("fast", [False, "auto"])
def test_a_revision_selects_weights_and_tokenizer(hub: Path, fast: Any) -> None:
    texts = []
    for revision, seed, template in (("main", 0, None), ("v2", 5, OTHER_TEMPLATE)):
        decoder = SpeculativeDecoder("org/name", fast=fast, **options_for(hub, revision=revision))
        texts.append(decoder.generate(PROMPT, PARAMS).token_ids)
        assert texts[-1] == reference(model_of_seed(seed), PROMPT, 12) and template_of(decoder) == template
    assert texts[0] != texts[1]


@pytest.mark.slow
def test_a_revision_selects_weights_that_are_quantized_at_load(hub: Path) -> None:
    options = {"cache_dir": str(hub), "revision": "v2"}
    by_name = load("org/name", LoadOptions(device="cpu", extra=options, rounding="int8"))
    by_folder, other = (
        load(snapshot(hub, name), LoadOptions(device="cpu", rounding="int8")) for name in ("v2", "main")
    )
    texts = [
        SpeculativeDecoder(loaded.model).generate(PROMPT, PARAMS).token_ids for loaded in (by_name, by_folder, other)
    ]
    assert by_name.arithmetic and texts[0] == texts[1] != texts[2]


def test_a_draft_model_has_a_revision_and_a_configuration_of_its_own(hub: Path) -> None:
    options = {"revision": "v2", "max_position_embeddings": 512}
    decoder = SpeculativeDecoder("org/name", "org/draft", **options_for(hub, **options))
    assert decoder.draft is not None
    assert (decoder.target.backend.max_length, decoder.draft.backend.max_length) == (512, 1024)
    assert decoder.generate(PROMPT, PARAMS).token_ids == reference(model_of_seed(5), PROMPT, 12)


def test_options_of_targets_are_refused_where_only_a_draft_model_is_loaded(hub: Path) -> None:
    message = (
        "load_options 'revision', but the target is loaded already; allowed: cache_dir, .* the draft model gets too"
    )
    with pytest.raises(UsageError, match=message):
        SpeculativeDecoder(shared("llama"), "org/draft", load_options={"cache_dir": str(hub), "revision": "main"})
    decoder = SpeculativeDecoder(shared("llama"), "org/draft", load_options={"cache_dir": str(hub)})
    assert decoder.draft is not None and decoder.draft.name == "org/draft"


def test_a_revision_of_a_local_folder_is_refused(hub: Path) -> None:
    with pytest.raises(UsageError, match=r"load_options revision='v2', but model '.*' is a local folder; allowed: rev"):
        SpeculativeDecoder(snapshot(hub, "main"), load_options={"revision": "v2"})


def test_a_subfolder_selects_weights_and_tokenizer(tmp_path: Path) -> None:
    model_of_seed(5).save_pretrained(tmp_path / "inner")
    tokenizer(template=OTHER_TEMPLATE).save_pretrained(tmp_path / "inner")
    decoder = SpeculativeDecoder(str(tmp_path), load_options={"subfolder": "inner"}, **LOADING)
    assert decoder.generate(PROMPT, PARAMS).token_ids == reference(model_of_seed(5), PROMPT, 12)
    assert template_of(decoder) == OTHER_TEMPLATE


def test_load_options_reach_configuration_weights_and_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: dict[str, Any] = {}
    for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):
        kind = getattr(transformers, name)

        def recorded(*args: Any, read: Any = kind.from_pretrained, name: str = name, **options: Any) -> Any:
            tokens.setdefault(name, options.get("token"))
            return read(*args, **options)

        monkeypatch.setattr(kind, "from_pretrained", recorded)
    SpeculativeDecoder(str(folder), load_options={"token": "secret"}, **LOADING)
    assert tokens == dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "secret")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model with a tokenizer."""
    model_of_seed(0).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def questions(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions asked at the terminal; code from folders is copied into a temporary folder."""
    asked: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda text="": asked.append(text) or "y")
    modules = str(tmp_path_factory.mktemp("modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    return asked


def with_code(folder: Path, **files: dict[str, Any]) -> None:
    """Puts code into a folder and entries that name it into its JSON files."""
    (folder / "own_code.py").write_text(OWN_CODE)
    for name, entries in files.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | entries))


MODEL_CODE = {"model_type": "of_its_own", "auto_map": OWN_CONFIG, "architectures": ["OwnModel"]}
TOKENIZER_CODE = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own_code.OwnTokenizer"]}}
CODE: dict[str, dict[str, Any]] = {
    "model": {"config": MODEL_CODE},
    "tokenizer": {"tokenizer_config": TOKENIZER_CODE},
    "both": {"config": MODEL_CODE, "tokenizer_config": TOKENIZER_CODE},
}


@pytest.mark.parametrize("code_part", CODE)
def test_code_of_a_repository_runs_where_it_is_trusted(
    code_part: str, folder: Path, questions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])  # transformers adds the folder of such code
    with_code(folder, **CODE[code_part])
    decoder = SpeculativeDecoder(str(folder), load_options={"trust_remote_code": True}, **LOADING)
    assert decoder.generate(PROMPT, PARAMS).token_ids == reference(model_of_seed(0), PROMPT, 12)
    assert isinstance(decoder.tokenizer, HFTokenizer) and not questions
    assert (type(decoder.target.model).__name__ == "OwnModel") == (code_part != "tokenizer")
    assert (type(decoder.tokenizer.inner).__name__ == "OwnTokenizer") == (code_part != "model")


@pytest.mark.parametrize("code_part", CODE)
@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}])
def test_code_of_a_repository_is_refused_and_nobody_is_asked(
    code_part: str, options: dict[str, Any], folder: Path, questions: list[str]
) -> None:
    with_code(folder, **CODE[code_part])
    with pytest.raises(
        SlipstreamError, match=r"needs code of its own.*allowed: .*\"trust_remote_code\": True"
    ) as error:
        SpeculativeDecoder(str(folder), **options)
    assert not questions and "\n" not in str(error.value)
    with pytest.raises(SlipstreamError, match="needs code of its own"):
        inspect_vocabulary(str(folder))
    assert not questions


@pytest.mark.parametrize("wrong", [[], "", 0])
def test_load_options_that_are_no_mapping_are_refused_even_if_empty(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"load_options=.*; allowed: a mapping of from_pretrained arguments"):
        SpeculativeDecoder("toy", load_options=wrong)
