"""GGUF files by name from a stand-in of the hub: only what is named, whole, checked, continued where it stopped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slipstream import SlipstreamError, UsageError
from slipstream.models.weights import hub_files
from slipstream.models.weights.hub_files import local_file
from slipstream.models.weights.named_models import gigabytes_needed
from slipstream.models.weights.stored_models import memory_needed, pull_model
from tests.support.command_line import run
from tests.support.hub_server import HubServer, commit, connect, digest, hub_server

LARGE = bytes(range(256)) * 4000
FILES = {
    "README.md": b"A model.",
    "m-Q4_K_M.gguf": LARGE,
    "m-Q8_0-00001-of-00002.gguf": b"first",
    "m-Q8_0-00002-of-00002.gguf": b"second",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    two = {"a-Q4_K_M.gguf": b"a", "b-Q4_K_M.gguf": b"b"}
    with hub_server({"o/m-GGUF": FILES, "o/two-GGUF": two, "o/plain": FILES, "o/empty-GGUF": {}}) as server:
        connect(monkeypatch, server, str(tmp_path / "hub"))
        yield server


def contents(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.suffix != ".lock"]


def test_only_the_named_file_is_fetched_and_once(hub: HubServer, tmp_path: Path) -> None:
    path = Path(local_file("o/m-GGUF"))
    assert path.name == "m-Q4_K_M.gguf" and path.read_bytes() == LARGE and path.parent.name == commit("o/m-GGUF")
    assert [part for method, part, _ in hub.requests if method == "GET" and part.startswith("/cdn/")] == [
        "/cdn/o/m-GGUF/m-Q4_K_M.gguf"
    ]
    count = len(hub.requests)
    for name in ("o/m-GGUF", "o/m-GGUF:Q4_K_M", "hf.co/o/m-GGUF:m-Q4_K_M.gguf"):
        assert local_file(name) == str(path)
    assert len(hub.requests) == count  # what is here is used without asking
    pull_model("o/m-GGUF")  # asks whether there is a newer version
    assert len(hub.requests) > count and len(hub.asked("GET", "/cdn/")) == 1


def test_the_memory_that_a_model_needs_counts_all_its_files_and_its_draft_model(hub: HubServer, tmp_path: Path) -> None:
    def gigabytes_of(*names: str | None) -> float:
        return memory_needed(*names) / 1e9  # type: ignore[arg-type]

    parts = len(b"firstsecond") / 1e9
    assert gigabytes_of("o/m-GGUF:q8_0", None) == pytest.approx(gigabytes_needed(parts), abs=1e-9)
    both = gigabytes_of("o/m-GGUF:q8_0", "o/m-GGUF")
    assert both == pytest.approx(gigabytes_needed(parts + len(LARGE) / 1e9), abs=1e-9)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("config.json", "a.safetensors", "b.safetensors"):
        (folder / name).write_bytes(bytes(1000))
    assert gigabytes_of(str(folder), "none") == pytest.approx(gigabytes_needed(2e-6), abs=1e-9)
    assert gigabytes_of("toy", "toy:2") == gigabytes_needed(0)


def test_all_parts_of_a_split_model_are_fetched_and_the_first_is_named(hub: HubServer) -> None:
    first = Path(local_file("o/m-GGUF:q8_0"))
    assert first.name == "m-Q8_0-00001-of-00002.gguf"
    assert first.with_name("m-Q8_0-00002-of-00002.gguf").read_bytes() == b"second"
    first.with_name("m-Q8_0-00002-of-00002.gguf").unlink()
    assert local_file("o/m-GGUF:q8_0") == str(first) and first.with_name("m-Q8_0-00002-of-00002.gguf").exists()


def test_a_cut_download_continues_in_the_same_run(hub: HubServer) -> None:
    hub.cuts, hub.statuses = [1000, 500_000], [503]
    assert Path(local_file("o/m-GGUF")).read_bytes() == LARGE
    assert [headers.get("range") for headers in hub.asked("GET", "/cdn/")] == [
        *(None, None, "bytes=1000-", "bytes=501000-")
    ]


def test_a_download_that_fails_continues_in_the_next_run_and_leaves_nothing_that_loads(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.cuts = [1000, *[0] * 10]
    with pytest.raises(SlipstreamError, match=r"the connection ended after 1,000 of 1,024,000 bytes of m-Q4_K_M\.gguf"):
        local_file("o/m-GGUF")
    assert contents(tmp_path / "hub") == [LARGE[:1000]] and not list((tmp_path / "hub").rglob("*.gguf"))
    hub.cuts = []
    assert Path(local_file("o/m-GGUF")).read_bytes() == LARGE
    assert hub.asked("GET", "/cdn/")[-1]["range"] == "bytes=1000-"
    assert sorted(map(len, contents(tmp_path / "hub")))[-2:] == [len(LARGE)] * 2  # the content and its name


def test_a_server_that_sends_no_parts_is_asked_for_the_whole(hub: HubServer) -> None:
    hub.cuts, hub.sends_parts = [1000], False
    assert Path(local_file("o/m-GGUF")).read_bytes() == LARGE


def test_a_damaged_file_is_deleted_and_named(hub: HubServer, tmp_path: Path) -> None:
    hub.changes_bytes = True
    with pytest.raises(SlipstreamError, match=rf"m-Q4_K_M\.gguf arrived damaged .* the hub's {digest(LARGE)}"):
        local_file("o/m-GGUF")
    assert contents(tmp_path / "hub") == []


def test_a_file_that_shrank_since_its_first_part_came_is_fetched_anew(hub: HubServer, tmp_path: Path) -> None:
    blobs = tmp_path / "hub" / "models--o--m-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{digest(LARGE)}{hub_files.PARTIAL}").write_bytes(LARGE + b"more")
    with pytest.raises(SlipstreamError, match="arrived damaged and was deleted"):
        local_file("o/m-GGUF")
    assert Path(local_file("o/m-GGUF")).read_bytes() == LARGE


def test_a_gated_repository_says_what_to_do_and_opens_with_a_token(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.tokens["o/m-GGUF"] = "secret"
    gated = r"o/m-GGUF is gated: accept its terms at https://huggingface\.co/o/m-GGUF, then run `hf auth login` or set"
    for token in (None, "wrong"):
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(SlipstreamError, match=gated):
            local_file("o/m-GGUF")
    assert local_file("o/m-GGUF", {"token": "secret"}).endswith("m-Q4_K_M.gguf")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert local_file("o/m-GGUF:Q8_0").endswith("m-Q8_0-00001-of-00002.gguf")
    assert all("authorization" not in headers for headers in hub.asked("GET", "/cdn/"))  # another host


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("o/absent-GGUF", "The hub: there is no repository o/absent-GGUF that you may read: check the name"),
        ("o/m-GGUF:Q5_K_M", "o/m-GGUF has no 'Q5_K_M'; allowed: o/m-GGUF:Q4_K_M (0.0 GB), o/m-GGUF:Q8_0 (0.0 GB)"),
        ("o/m-GGUF:x.gguf", "o/m-GGUF has no 'x.gguf'; allowed: o/m-GGUF:Q4_K_M"),
        ("o/two-GGUF", "has 2 models that are 'Q4_K_M'; allowed: o/two-GGUF:a-Q4_K_M.gguf (0.0 GB), o/two-GGUF:b-"),
        ("o/empty-GGUF", "o/empty-GGUF has no GGUF files; allowed: a repository with such files"),
        ("hf.co/o/m-GGUF/blob/v9/x.gguf", "The hub: o/m-GGUF has no such revision"),
        ("o/" + "m" * 3000 + "-GGUF", "cannot be on the hub; allowed in a repository's name: up to 96"),
        ("o/m-GGUF:" + "Q" * 3000, "o/m-GGUF has no 'QQQ"),
    ],
)
def test_what_is_not_there_is_one_line_that_says_what_is(name: str, words: str, hub: HubServer) -> None:
    with pytest.raises(SlipstreamError) as refusal:
        local_file(name)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)
    assert not hub.asked("GET", "/cdn/")


def test_a_folder_of_the_repository_is_a_part_of_the_name(hub: HubServer) -> None:
    with pytest.raises(UsageError, match=r"subfolder='s' with a GGUF file; allowed: o/m-GGUF:s/FILE"):
        local_file("o/m-GGUF", {"subfolder": "s"})


def test_without_a_network_what_is_here_is_used_and_what_is_not_is_named(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = local_file("o/m-GGUF")
    with pytest.raises(SlipstreamError, match="local_files_only"):
        local_file("o/m-GGUF:Q8_0", {"local_files_only": True})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    count = len(hub.requests)
    assert local_file("o/m-GGUF") == path == str(pull_model("o/m-GGUF"))
    for fetch in (local_file, pull_model):
        with pytest.raises(SlipstreamError, match="it is not asked, as HF_HUB_OFFLINE is set"):
            fetch("o/m-GGUF:Q8_0")
    assert len(hub.requests) == count


def test_a_full_disk_is_noticed_before_anything_is_fetched(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(SlipstreamError, match=r"needs 0\.0 GB on the disk of .*, which has 0\.0 GB left; free some"):
        local_file("o/m-GGUF")
    assert not hub.asked("GET", "/cdn/")


def test_a_cache_that_cannot_be_written_is_named(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "hub").touch()
    with pytest.raises(SlipstreamError, match=r"cannot be stored in .*hub: .*; set HF_HOME to a folder that can be"):
        local_file("o/m-GGUF")


def test_two_that_want_the_same_file_fetch_it_once(hub: HubServer) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(local_file, ["o/m-GGUF", "o/m-GGUF:Q4_K_M"])
    assert first == second and Path(first).read_bytes() == LARGE
    assert len(hub.asked("GET", "/cdn/")) == 1


def test_a_repository_of_gguf_files_alone_is_not_pulled_as_a_whole(
    hub: HubServer, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, _, err = run(capsys, monkeypatch, "models", "pull", "o/plain:q8_0")
    assert code == 0 and err.rstrip().endswith("m-Q8_0-00001-of-00002.gguf")
    count = len(hub.asked("GET", "/o/plain/resolve/"))
    with pytest.raises(SlipstreamError, match="allowed: its GGUF files: o/plain:Q4_K_M, o/plain:Q8_0"):
        pull_model("o/plain")
    assert len(hub.asked("GET", "/o/plain/resolve/")) == count
    with pytest.raises(UsageError, match="is on this machine already"):
        pull_model(str(tmp_path))
