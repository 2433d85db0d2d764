"""A hook of MkDocs that generates pages of the documentation from the code.

`reference/cli.md` comes from the commands of the command line, `reference/settings.md` from the fields of
`DecoderConfig` and `SamplingParams`; `reference/python.md` lists the names that mkdocstrings documents. `Docstrings` is
an extension of griffe, which reads the docstrings for mkdocstrings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import typer
from griffe import Extension, Object

from slipstream import SamplingParams
from slipstream.apps import cli
from slipstream.config import DecoderConfig
from slipstream.sampling.params import OWN_OPTIONS

ROOT = Path(__file__).parents[1]
PROJECT_FILES = ("contributing.md", "changelog.md", "security.md")
PYTHON = (
    "slipstream.SpeculativeDecoder",
    "slipstream.SamplingParams",
    "slipstream.Constraint",
    "slipstream.Result",
    "slipstream.text.results.Stream",
    "slipstream.Chunk",
    "slipstream.Stats",
    "slipstream.Draft",
    "slipstream.Row",
    "slipstream.core.types.Traits",
    "slipstream.Round",
    "slipstream.Drafter",
    "slipstream.CustomGenerate",
    "slipstream.compare",
    "slipstream.benchmark",
    "slipstream.check_pair",
    "slipstream.SlipstreamError",
    "slipstream.UsageError",
)

ARGUMENT = r"([a-z_]\w*(?:, [a-z_]\w*)*): "  # the beginning of "name, other_name: what they are."


class Docstrings(Extension):
    """Makes Markdown of docstrings, so that the page has one argument a line."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = in_markdown(obj.docstring.value)


def in_markdown(docstring: str) -> str:
    """Sentences that begin a line become paragraphs, and arguments a list."""
    written = ""
    for line in re.sub(rf"(?<=[.;]) (?={ARGUMENT})", "\n", docstring).splitlines():
        may_begin = not written or written.endswith((".", ":", ";", "\n"))
        if may_begin and (argument := re.match(ARGUMENT, line)):
            names = ", ".join(f"`{name}`" for name in argument[1].split(", "))
            written = f"{written.rstrip(';')}\n\n- {names}: {line[argument.end() :]}"
        else:
            begins = written.endswith(".") or line.startswith("- ")
            written += ("\n\n" if begins else "\n") + line
    return written.strip()


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to those of docs/."""
    from mkdocs.structure.files import File

    pages = {"cli": command_line(), "settings": settings(), "python": python()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill the pages that show a file of the repository's root, such as CONTRIBUTING.md."""
    name = page.file.src_uri
    if name not in PROJECT_FILES:
        return markdown
    text = (ROOT / f"{name.removesuffix('.md').upper()}.md").read_text(encoding="utf-8")
    for file in PROJECT_FILES:
        text = text.replace(f"]({file.removesuffix('.md').upper()}.md)", f"]({file})")
    return text.replace("](docs/", "](")


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that can be run, with its full name."""
    yield from _below("slipstream", typer.main.get_command(cli.app))


def _below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    parts = getattr(command, "commands", None)
    if parts is None or (command.invoke_without_command and name != "slipstream"):
        yield name, command
    for part, child in (parts or {}).items():
        if not child.hidden:
            yield from _below(f"{name} {part}", child)


def command_line() -> str:
    """The page of the command line."""
    out = ["# Command line", "Every command and every option, as `--help-all` prints them."]
    for name, command in commands():
        out += [f"## {name}", _plain(command.help or "")]
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option"]
        words = " ".join((p.metavar or str(p.name).upper()) for p in arguments)
        out.append(f"```text\n{name} [OPTIONS] {words}".rstrip() + "\n```")
        rows = [
            f"| {', '.join(f'`{o}`' for o in [*p.opts, *p.secondary_opts])} | {_plain(p.help or '')}{_default(p)} |"
            for p in options
        ]
        out.append("\n".join(["| option | meaning |", "|---|---|", *rows]))
    return "\n\n".join(out) + "\n"


def _default(option: Any) -> str:
    if option.is_flag or option.default in (None, "", (), []) or callable(option.default):
        return ""
    if str(option.default).startswith("Sentinel"):
        return ""
    return f" (default: `{option.default}`)"


def _plain(text: str) -> str:
    """Text for a cell of a Markdown table: one line, special characters escaped."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def settings() -> str:
    """The page of the decoder's settings and the sampling options."""
    out = [
        "# Settings",
        "Arguments of `SpeculativeDecoder`, flags of the same names (`-` for `_`), and keys of a `--config` file:",
        _table(DecoderConfig),
        "## Sampling options",
        "Fields of `SamplingParams`, keywords of `generate`, `chat` and `stream`, and keys of a request's line:",
        _table(SamplingParams),
    ]
    return "\n\n".join(out) + "\n"


def _table(settings: Any) -> str:
    rows = ["| name | default | meaning |", "|---|---|---|"]
    for field in fields(settings):
        default = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
        own = "the model's own, or " if settings is SamplingParams and field.name in OWN_OPTIONS else ""
        rows.append(f"| `{field.name}` | {own}`{default!r}` | {_plain(field.metadata.get('help', ''))} |")
    return "\n".join(rows)


def python() -> str:
    """The page that mkdocstrings fills from docstrings."""
    return "# Python\n\nSettings and sampling options have [a page of their own](settings.md).\n\n" + "\n\n".join(
        f"::: {name}" for name in PYTHON
    )
