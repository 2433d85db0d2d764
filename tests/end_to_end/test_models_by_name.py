"""From an empty home to an answer: a short name's target and draft model come from the hub, here a stand-in of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream import SpeculativeDecoder
from slipstream.models.weights.named_models import short_names
from tests.support.gguf_files import write_chat_model
from tests.support.hub_server import hub_server

pytest.importorskip("gguf")


@pytest.mark.slow
def test_a_short_name_answers_in_an_empty_home_with_its_draft_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = short_names()["qwen3:4b"]
    assert target.draft is not None
    draft = short_names()[target.draft]
    write_chat_model(tmp_path / "target.gguf")
    shutil.copy(tmp_path / "target.gguf", tmp_path / "draft.gguf")  # all of its drafts are accepted
    served = {
        row.repository: {row.file: (tmp_path / f"{file}.gguf").read_bytes(), "README.md": b"A model."}
        for row, file in ((target, "target"), (draft, "draft"))
    }
    (tmp_path / "home").mkdir()
    with hub_server(served) as hub:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url}
        environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}

        words = [sys.executable, "-m", "slipstream", "generate", "--model", "qwen3:4b", "Why?", "--max-tokens", "6"]
        words += ["--temperature", "0", "--json", str(tmp_path / "result.json")]
        run = subprocess.run(words, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
        assert run.returncode == 0, run.stderr
        assert [run.stderr.count(f"downloading {row.file}") for row in (target, draft)] == [1, 1]
        assert not hub.asked("GET", f"/{target.repository}/resolve/main/README.md")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["target"], result["draft"]) == ("qwen3:4b", "qwen3:0.6b")
    # from now on without a network: the tests' own environment sets HF_HUB_OFFLINE
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home/.cache/huggingface/hub"))
    with SpeculativeDecoder("qwen3:4b") as decoder, SpeculativeDecoder(str(tmp_path / "target.gguf")) as alone:
        assert decoder.draft is not None and alone.draft is None
        assert (decoder.target.name, decoder.draft.name) == ("qwen3:4b", "qwen3:0.6b")
        texts = [each.generate("Why?", max_tokens=6, temperature=0.0).token_ids for each in (decoder, alone)]
    assert texts[0] == texts[1] == result["results"][0]["token_ids"] != []
