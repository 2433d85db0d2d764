"""The standard files of a project exist and agree with the package."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.version import __version__
from tests.support.markers import subcases

ROOT = Path(__file__).parents[2]
FILES = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"\[[^\]]+\]\(([^)#:]+)(?:#[^)]*)?\)")
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@subcases("name", FILES)
def test_relative_links_lead_to_existing_files(name: str) -> None:
    assert [link for link in LINK.findall(text(name)) if "//" not in link and not (ROOT / link).exists()] == []


def test_the_changelog_has_the_version_and_standard_headings_only() -> None:
    versions = re.findall(r"(?m)^## \[([^\]]+)\]", text("CHANGELOG.md"))
    assert versions[0] == "Unreleased"
    assert __version__ in versions or f"version, {__version__}" in text("CHANGELOG.md")
    kinds = set(re.findall(r"(?m)^### (.*)", text("CHANGELOG.md")))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_citation_has_the_current_version_and_license() -> None:
    citation = yaml.safe_load(text("CITATION.cff"))
    project: dict[str, Any] = tomllib.loads(text("pyproject.toml"))["project"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # fields that the schema requires
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert (str(citation["version"]), citation["license"]) == (__version__, project["license"])
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in project["authors"]]
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= reference.keys()


@pytest.mark.parametrize("file", [file for file in TEMPLATES if file.stem != "config"], ids=lambda file: file.stem)
def test_issue_templates_have_what_a_form_needs(file: Path) -> None:
    form = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    identifiers = [item["id"] for item in form["body"]]
    assert len(identifiers) == len(set(identifiers)) > 1
    assert all(item["type"] in ("textarea", "input") and item["attributes"]["label"] for item in form["body"])


def test_the_example_drafter_of_contributing_md_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream import SamplingParams, SpeculativeDecoder, drafters

    (code,) = re.findall(r"```python\n(.*?)```", text("CONTRIBUTING.md"), re.DOTALL)
    (tmp_path / "echo.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    params = SamplingParams(max_tokens=12, temperature=0.0)
    with SpeculativeDecoder("toy", drafter="echo", num_draft_tokens=4) as decoder:
        result = decoder.generate("The heron", params)
        assert result.stats.num_draft_tokens > 0
        assert result.token_ids == decoder.using("none").generate("The heron", params).token_ids


def test_the_image_installs_the_wheel_and_checks_health() -> None:
    image = text("docker/Dockerfile")
    assert "build_wheels.py" in image and "HEALTHCHECK" in image and "/health" in image
    copied = {source for line in re.findall(r"(?m)^COPY (?!--from)(.*) \S+$", image) for source in line.split()}
    kept = {line[1:] for line in text(".dockerignore").splitlines() if line.startswith("!")}
    assert copied == kept and all((ROOT / name).exists() for name in copied)
    stages = set(re.findall(r"(?m)^FROM \S+ AS (\S+)", image))
    assert {"torch-cpu", "torch-cuda"} <= stages and "FROM torch-${DEVICE}" in image


def test_documented_docker_runs_mount_keys_and_models() -> None:
    image = text("docker/Dockerfile")
    (entrypoint,) = re.findall(r"(?m)^ENTRYPOINT (.*)$", image)
    command = json.loads(entrypoint)
    keys = command[command.index("--api-key-file") + 1]
    (models,) = re.findall(r"(?m)^VOLUME (\S+)$", image)
    runs = re.findall(r"docker run -p .*", image + text("docs/operate.md"))
    assert len(runs) == 2 and all(f":{keys}:ro " in run and f":{models} " in run for run in runs)
