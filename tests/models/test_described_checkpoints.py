"""Checkpoints start without transformers once it has described them: the same bits, or transformers' own path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.models.decoder.planned_model import PLANNED, PlannedModel
from slipstream.models.described_checkpoints import load_described
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.models.pretrained import load_pretrained
from tests.support.gguf_architectures import CASES, model_of
from tests.support.markers import needs_avx2

pytestmark = [pytest.mark.usefixtures("own_cache"), needs_avx2]
NAMES = [name for name, case in CASES.items() if case.model_type in PLANNED]
IDS = torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(4))


def write(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> str:
    case = CASES[name]
    heads = {} if "head_dim" in case.settings else {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = replace(case, settings=case.settings | heads | changes).config()
    model_of(config).to(dtype).save_pretrained(folder)
    return str(folder)


def both(source: str, options: LoadOptions) -> tuple[Loaded, Loaded | None]:
    return load_pretrained(source, options, None, None), load_described(source, options, None)


def logits(loaded: Loaded) -> list[torch.Tensor]:
    backend = loaded.backend
    backend.reserve(2, 256)
    whole = backend.forward(IDS, [0], first_slot=0, logits=True)
    return [whole, backend.forward(IDS[:, :7], [0], first_slot=1, logits=True)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_all(name: str, dtype: str, tmp_path: Path) -> None:
    own, planned = both(write(tmp_path, name), LoadOptions(dtype))
    if planned is None:
        pytest.skip(f"{name} {dtype} stack {getattr(own.backend, 'stack', None) is not None}")
    assert isinstance(planned.model, PlannedModel)
    assert all(torch.equal(*pair) for pair in zip(logits(own), logits(planned), strict=True))
    assert own.fingerprint == planned.fingerprint
    assert own.backend.weights_digest() == planned.backend.weights_digest()
