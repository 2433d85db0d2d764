"""`slipstream serve`, as it is typed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream import SlipstreamError
from slipstream.apps.cli.flags import Models
from slipstream.apps.cli.serve import model_choices
from slipstream.apps.server.launch import serve
from slipstream.apps.server.server_settings import ServerSettings
from slipstream.config import DecoderConfig
from tests.support.command_line import run
from tests.support.running_server import running_server


@pytest.mark.slow
def test_models_that_cannot_be_loaded_end_the_command_with_one_line(capsys, monkeypatch) -> None:
    code, _, errors = run(capsys, monkeypatch, "serve", "--target", "toy:99", "--port", "0")
    lines = errors.strip().splitlines()
    assert code == 2 and lines[-1].startswith("error: model 'toy:99'") and "Traceback" not in errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models = 3", "models=3; allowed: tables such as [models.coder]"),
        ('[models]\ncoder = "toy"', "models={'coder': 'toy'}; allowed: tables such as [models.coder]"),
        ("[models.a]\nport = 9", "models.a has the key 'port', which is the server's; allowed: above all tables"),
        ("[models.a]\nprot = 9", "models.a has the unknown key 'prot'; allowed: acceptance, "),
        ('[models.a]\ndraft = "toy"', "models.a has no model; allowed: model = NAME"),
        ('[models.a]\nmodel = "toy"\nmax_model_len = "x"', "models.a.max_model_len='x'; allowed: a whole number"),
        ('[models.a]\nmodel = "toy"\nmax_model_len = -4', "models.a: max_model_len=-4; allowed: a whole number from 0"),
        ('[models.a]\nmodel = "toy"\nidle_minutes = -1', "models.a: idle_minutes=-1.0; allowed: minutes from 0"),
        ('[models.a]\nmodel = "toy"\ndrafter = "sufix"', "models.a: "),
        ('[models.a]\nmodel = "toy"\ndtype = "int3"', "models.a: dtype='int3'; allowed: "),
        ('[models.a]\nmodel = "toy"\nload_options = "{"', "models.a.load_options: --load-options '{' is not JSON"),
        (
            '[models.a]\nmodel = "toy"\nserved_model_name = "b"\n[models.b]\nmodel = "toy"',
            "served_model_name='b' is the name of two models; allowed: a name for each",
        ),
    ],
)
def test_what_a_table_says_wrong_is_named(text: str, message: str, capsys, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(text)
    code, _, errors = run(capsys, monkeypatch, "serve", "--config", str(tmp_path / "s.toml"))
    assert code == 2 and message in " ".join(errors.split()) and errors.count("error: ") == 1, errors


def test_only_a_server_takes_tables(capsys, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('[models.a]\nmodel = "toy"')
    code, _, errors = run(capsys, monkeypatch, "generate", "A heron", "--config", str(tmp_path / "s.toml"))
    assert code == 2 and "has the unknown key 'models'" in errors


def test_values_of_flags_hold_for_tables_that_leave_them_out() -> None:
    tables = {"a": {"target": "toy", "max_model_len": 512, "drafter": "ngram"}, "b": {}}
    settings = ServerSettings(max_model_len=1024, idle_minutes=3.0, strict=True)
    a, b = model_choices(tables, Models("toy:3", "toy"), DecoderConfig(max_batch_size=2), settings)
    assert (a.models, b.models) == (Models("toy", "toy"), Models("toy:3", "toy"))
    assert (a.config, b.config) == (DecoderConfig(max_batch_size=2, drafter="ngram"), DecoderConfig(max_batch_size=2))
    assert a.settings == replace(settings, max_model_len=512, served_model_name=("a",))
    assert b.settings == replace(settings, served_model_name=("b",))


def test_an_address_in_use_is_refused_before_anything_is_loaded() -> None:
    with running_server() as server:
        port = int(server.url.rpartition(":")[2])
        why = f"cannot listen on 127.0.0.1:{port}: Address already in use; allowed: --port N with another port"
        with pytest.raises(SlipstreamError, match=why):
            serve(ServerSettings(port=port), [], lambda server: None)
