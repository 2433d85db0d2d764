"""The benchmark of MTP layers: both systems write the text the weights were made for, and any other is detected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mtp
import pytest
from transformers.modeling_layers import MtpModel

pytestmark = pytest.mark.exhaustive

SMALL: dict[str, Any] = {"lengths": "1,2", "batches": "1,2", "max_tokens": 12, "repeats": 1}
SMALL |= {"vocab": 256, "hidden": 128, "depth": 1}


@pytest.fixture(autouse=True)
def layers_are_read_as_ever_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MtpModel, "from_pretrained", MtpModel.from_pretrained)


def test_every_arm_is_measured_with_the_right_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    mtp.main(layers=2, json_file=out, **SMALL)
    seconds = json.loads(out.read_text())["seconds_per_token"]
    assert list(seconds["1"]) == list(seconds["2"]) == [mtp.PLAIN, "1", "2", mtp.AUTO, mtp.THEIR_PLAIN, mtp.THEIRS]
    assert "2 of 2" in capsys.readouterr().out


def test_a_wrong_text_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write = mtp.write_model
    monkeypatch.setattr(mtp, "write_model", lambda *arguments: write(*arguments)[::-1])
    with pytest.raises(SystemExit) as end:
        mtp.main(**SMALL | {"batches": "1"})
    assert end.value.code == 1 and "0 of 1" in capsys.readouterr().out
