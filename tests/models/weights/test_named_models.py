"""Short names, and OWNER/REPO:QUANTIZATION: which file of which repository a name means."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream import UsageError
from slipstream.models.weights.model_files import EMBEDDED
from slipstream.models.weights.named_models import HubName, hub_name, models_among, short_names, wanted_among
from slipstream.models.weights.resolve import place_of

Q4 = HubName("o/m-GGUF", "Q4_K_M")


def test_every_short_name_has_one_gguf_file_and_a_smaller_draft_model() -> None:
    for name, row in short_names().items():
        assert name == name.lower() and name.count(":") == 1 and "/" not in name
        assert [model.files for model in models_among([row.file])] == [(row.file,)]
        assert hub_name(name.upper()) == HubName(row.repository, row.file)
        draft = short_names().get(row.draft or name)
        assert row.draft in (None, EMBEDDED) or (draft is not None and draft.gigabytes < row.gigabytes / 2)
        assert row.gigabytes_needed > row.gigabytes


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("o/m-GGUF", Q4),
        ("o/m-gguf:q5_k_s", HubName("o/m-gguf", "q5_k_s")),
        ("o/m:Q8_0", HubName("o/m", "Q8_0")),
        ("o/m-GGUF:sub/a.gguf", HubName("o/m-GGUF", "sub/a.gguf")),
        ("hf.co/o/m-GGUF", Q4),
        ("hf.co/o/m-GGUF:Q4_K_M", Q4),
        ("huggingface.co/o/m-GGUF", Q4),
        ("https://huggingface.co/o/m-GGUF/", Q4),
        ("https://www.huggingface.co/o/m-GGUF?library=x#files", Q4),
        ("https://huggingface.co/o/m-GGUF/tree/main", Q4),
        ("https://huggingface.co/o/m-GGUF/tree/v2", HubName("o/m-GGUF", "Q4_K_M", "v2")),
        ("https://huggingface.co/o/m/blob/main/a-Q8_0.gguf", HubName("o/m", "a-Q8_0.gguf")),
        ("https://huggingface.co/o/m/resolve/v2/s/a.gguf?download=true", HubName("o/m", "s/a.gguf", "v2")),
        *((other, None) for other in ("o/m", "smollm2", "toy", "gpt2", "o/m:", "o/m: Q4", "o/m:Q4 ", "a b/m-GGUF", "")),
        *(
            (path, None)
            for path in ("./o/m-GGUF", "../m-GGUF:Q4", "/o/m-GGUF", "~/m-GGUF", "o/../m-GGUF", "a/b/m-GGUF", "a/m.gguf")
        ),
        *(
            (address, None)
            for address in ("https://huggingface.co/o/m", "https://example.com/o/m-GGUF", "ftp://hf.co/o/m")
        ),
        ("x" * 5000, None),
    ],
)
def test_a_name_means_a_file_of_a_repository_or_nothing(source: str, meant: HubName | None) -> None:
    assert hub_name(source) == meant


def test_what_lies_here_under_a_name_is_no_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("qwen3:4b", "o/m-GGUF"):
        Path(name).mkdir(parents=True)
        assert hub_name(name) is None
        with pytest.raises(UsageError, match=r"has no config\.json; allowed: a Hugging Face model folder"):
            place_of(name)


FILES = [
    *("README.md", "mmproj-m-F16.gguf", "m.imatrix.gguf", "imatrix_unsloth.gguf"),
    *("m-Q4_K_M.gguf", "m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf"),
    *("m-UD-Q4_K_XL.gguf", "m.q5_0.gguf", "Q8_0/m-00001-of-00002.gguf", "Q8_0/m-00002-of-00002.gguf"),
    *("m-IQ4_XS-imatrix.gguf", "m-BF16-00001-of-00003.gguf", "m-mxfp4.GGUF", "other.gguf"),
]


@pytest.mark.parametrize(
    ("wanted", "files"),
    [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),  # not the second copy in parts
        ("q5_0", ["m.q5_0.gguf"]),
        ("Q8_0", ["Q8_0/m-00001-of-00002.gguf", "Q8_0/m-00002-of-00002.gguf"]),
        ("UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("Q4_K_XL", []),  # of another size than the one without UD
        ("IQ4_XS", ["m-IQ4_XS-imatrix.gguf"]),
        ("MXFP4", ["m-mxfp4.GGUF"]),
        ("F16", []),  # the part for images
        ("BF16", []),  # two parts are missing
        ("other", ["other.gguf"]),
        ("M-mxfp4.gguf", ["m-mxfp4.GGUF"]),
        ("m-00002-of-00002.gguf", ["Q8_0/m-00001-of-00002.gguf", "Q8_0/m-00002-of-00002.gguf"]),
        ("ther.gguf", []),
    ],
)
def test_a_quantization_or_a_file_chooses_all_parts_of_one_model(wanted: str, files: list[str]) -> None:
    assert [file for model in wanted_among(models_among(FILES), wanted) for file in model.files] == files


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "mistral:7b",
            "allowed: a name that `slipstream models` lists, OWNER/REPO-GGUF:Q4_K_M for a file on the Hugging",
        ),
        ("mistral:7b", "or the file that `ollama show mistral:7b --modelfile` names after FROM"),
        ("qwen3:32b", "allowed: qwen3:0.6b, qwen3:1.7b, qwen3:4b"),
        ("llama3.2:latest", "allowed: llama3.2:1b, llama3.2:3b (`slipstream models` lists all)"),
        ("gemma3", "unknown model 'gemma3'; allowed: gemma3:1b, gemma3:4b"),
        ("user:x/model", "unknown model 'user:x/model'; allowed: a name that"),
        (":", "unknown model ':'; allowed: a name that"),
        ("o/m-GGUF/a/b.gguf", "does not exist; allowed: a readable .gguf file, or on the hub o/m-GGUF:a/b.gguf"),
        ("https://huggingface.co/o/m", "is an address; did you mean 'o/m'?"),
        ("https://huggingface.co/datasets/o/m", "is not a folder; allowed: a Hugging Face model folder"),
    ],
)
def test_an_unknown_name_says_what_to_write(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    with pytest.raises(UsageError) as refusal:
        place_of(name)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)
