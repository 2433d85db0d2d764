"""Pieces of a page: tables, lists of settings, figures, the frame around them. Everything given as text is escaped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from slipstream.bench.report.stylesheet import CSS


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[str] = ()) -> str:
    """A table that scrolls inside its box. words: the heads of columns that hold sentences, which may wrap."""
    cells = "".join(f'<th scope="col"{_align(name, words)}>{escape(name)}</th>' for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td{_align(n, words)}>{escape(v)}</td>" for n, v in zip(head, row, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f"{paragraph(caption, 'soft')}"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def settings_list(values: Mapping[str, Any]) -> str:
    """Names and values; what is not text is written as JSON."""
    items = "".join(f"<dt>{escape(str(name))}</dt><dd>{escape(_plain(value))}</dd>" for name, value in values.items())
    return f"<dl>{items}</dl>"


def figure(svg: str, caption: str) -> str:
    """A drawn chart with its caption. svg: trusted markup; caption: text."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def section(title: str, *parts: str) -> str:
    """A titled section; one without content is left out."""
    content = "".join(parts)
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    return f'<p class="{escape(kind)}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def bullets(lines: Sequence[str]) -> str:
    """A list of sentences."""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def folded(title: str, content: str, *, opened: bool = False) -> str:
    """Content to unfold. title: text; content: markup."""
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>{content}</details>"


def page(title: str, body: str) -> str:
    """The whole document, self-contained: it may load nothing, not even from where it lies."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body><main>{body}</main></body></html>\n"
    )


def _align(name: str, words: Sequence[str]) -> str:
    return ' class="word wrap"' if name in words else ""


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
