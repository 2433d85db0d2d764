"""Load options reach every file of the model they name, and nothing else; no repository's code runs unasked."""

import builtins
import json
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
        saved(seed).save_pretrained(folder / "snapshots" / commit)
        tokenizer(template=template).save_pretrained(folder / "snapshots" / commit)
    return cache


def saved(seed: int) -> Any:
    return fresh("llama", seed, intermediate_size=64)


def on(cache: Path, **options: Any) -> dict[str, Any]:
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
def test_a_revision_is_that_of_weights_and_tokenizer(hub: Path, fast: Any) -> None:
    texts = []
    for revision, seed, template in (("main", 0, None), ("v2", 5, OTHER_TEMPLATE)):
        made = SpeculativeDecoder("org/name", fast=fast, **on(hub, revision=revision))
        texts.append(made.generate(PROMPT, PARAMS).token_ids)
        assert texts[-1] == reference(saved(seed), PROMPT, 12) and template_of(made) == template
    assert texts[0] != texts[1]


@pytest.mark.slow
def test_a_revision_is_that_of_weights_that_are_quantised_at_load(hub: Path) -> None:
    options = {"cache_dir": str(hub), "revision": "v2"}
    by_name = load("org/name", LoadOptions(device="cpu", extra=options, rounding="int8"))
    by_folder, other = (
        load(snapshot(hub, name), LoadOptions(device="cpu", rounding="int8")) for name in ("v2", "main")
    )
    texts = [SpeculativeDecoder(made.model).generate(PROMPT, PARAMS).token_ids for made in (by_name, by_folder, other)]
    assert by_name.arithmetic and texts[0] == texts[1] != texts[2]


def test_a_draft_model_has_a_revision_and_a_configuration_of_its_own(hub: Path) -> None:
    options = {"revision": "v2", "max_position_embeddings": 512}
    made = SpeculativeDecoder("org/name", "org/draft", **on(hub, **options))
    assert made.draft is not None
    assert (made.target.backend.max_length, made.draft.backend.max_length) == (512, 1024)
    assert made.generate(PROMPT, PARAMS).token_ids == reference(saved(5), PROMPT, 12)


def test_options_of_targets_are_refused_where_only_a_draft_model_is_loaded(hub: Path) -> None:
    message = (
        "load_options 'revision', but the target is loaded already; allowed: cache_dir, .* the draft model gets too"
    )
    with pytest.raises(UsageError, match=message):
        SpeculativeDecoder(shared("llama"), "org/draft", load_options={"cache_dir": str(hub), "revision": "main"})
    made = SpeculativeDecoder(shared("llama"), "org/draft", load_options={"cache_dir": str(hub)})
    assert made.draft is not None and made.draft.name == "org/draft"


def test_a_folder_has_no_revision(hub: Path) -> None:
    with pytest.raises(UsageError, match=r"load_options revision='v2', but model '.*' is a local folder; allowed: rev"):
        SpeculativeDecoder(snapshot(hub, "main"), load_options={"revision": "v2"})


def test_a_subfolder_holds_weights_and_tokenizer(tmp_path: Path) -> None:
    saved(5).save_pretrained(tmp_path / "inner")
    tokenizer(template=OTHER_TEMPLATE).save_pretrained(tmp_path / "inner")
    made = SpeculativeDecoder(str(tmp_path), load_options={"subfolder": "inner"}, **LOADING)
    assert made.generate(PROMPT, PARAMS).token_ids == reference(saved(5), PROMPT, 12)
    assert template_of(made) == OTHER_TEMPLATE


def test_the_arguments_of_the_caller_reach_every_reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):
        kind = getattr(transformers, name)

        def noted(*args: Any, read: Any = kind.from_pretrained, name: str = name, **options: Any) -> Any:
            told.setdefault(name, options.get("token"))
            return read(*args, **options)

        monkeypatch.setattr(kind, "from_pretrained", noted)
    SpeculativeDecoder(str(folder), load_options={"token": "secret"}, **LOADING)
    assert told == dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "secret")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model with a tokenizer."""
    saved(0).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def asked(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What somebody at the terminal is asked; code from folders is copied to a place of the test's own."""
    questions: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda text="": questions.append(text) or "y")
    modules = str(tmp_path_factory.mktemp("modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    return questions


def with_code(folder: Path, **files: dict[str, Any]) -> None:
    """Give a folder code of its own and entries in its JSON files that name it."""
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


@pytest.mark.parametrize("of", CODE)
def test_code_of_a_repository_runs_where_it_is_trusted(of: str, folder: Path, asked: list[str]) -> None:
    with_code(folder, **CODE[of])
    made = SpeculativeDecoder(str(folder), load_options={"trust_remote_code": True}, **LOADING)
    assert made.generate(PROMPT, PARAMS).token_ids == reference(saved(0), PROMPT, 12)
    assert isinstance(made.tokenizer, HFTokenizer) and not asked
    assert (type(made.target.model).__name__ == "OwnModel") == (of != "tokenizer")
    assert (type(made.tokenizer.inner).__name__ == "OwnTokenizer") == (of != "model")


@pytest.mark.parametrize("of", CODE)
@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}])
def test_code_of_a_repository_is_refused_and_nobody_is_asked(
    of: str, options: dict[str, Any], folder: Path, asked: list[str]
) -> None:
    with_code(folder, **CODE[of])
    with pytest.raises(
        SlipstreamError, match=r"needs code of its own.*allowed: .*\"trust_remote_code\": True"
    ) as error:
        SpeculativeDecoder(str(folder), **options)
    assert not asked and "\n" not in str(error.value)
    with pytest.raises(SlipstreamError, match="needs code of its own"):
        inspect_vocabulary(str(folder))
    assert not asked


@pytest.mark.parametrize("wrong", [[], "", 0])
def test_what_is_no_mapping_is_refused_even_if_it_is_empty(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"load_options=.*; allowed: a mapping of from_pretrained arguments"):
        SpeculativeDecoder("toy", load_options=wrong)
