"""Pictures in chat messages: reads them from bytes, files and data URLs, and refuses damaged and huge ones in one line.

Needs Pillow, which is an optional dependency. This module knows no model.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

from slipstream.core.types import PromptImages
from slipstream.errors import UsageError, one_line, os_reason
from slipstream.tokenization.tokenizer import ChatForm, Tokenizer

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_BYTES = 20 << 20  # of a file
MAX_PIXELS = 32 << 20
MAX_PICTURES = 100  # in a conversation
KINDS = ("image", "image_url")  # types of parts
MARKS = "\ue000[0-9a-f]{64}\ue001"  # characters of private use
DATA_URL = re.compile(r"data:(image/[\w.+-]+)?(?:;[\w=.-]+)*;base64,", re.ASCII)
ALLOWED = "allowed: a PNG, JPEG, WebP or GIF image as a data URL (data:image/png;base64,...)"


@dataclass(frozen=True)
class Picture:
    """A picture that was given in a message."""

    name: str  # of the field, for refusals
    source: Any  # the bytes of a file, or a PIL image
    digest: str  # of these

    @property
    def mark(self) -> str:
        """Stands for the picture within a text."""
        return f"\ue000{self.digest}\ue001"

    def pixels(self) -> Any:
        """A PIL image in RGB. UsageError for a damaged file."""
        if not isinstance(self.source, bytes):
            return self.source.convert("RGB")
        from PIL import Image, ImageOps

        try:
            with Image.open(BytesIO(self.source), formats=FORMATS) as image:
                upright: Any = ImageOps.exif_transpose(image)
                return upright.convert("RGB")
        except Exception as error:  # decoders raise many kinds
            raise UsageError(f"{self.name} is a damaged image ({one_line(error)}); {ALLOWED}") from None


class Vision(Protocol):
    """The part of a target that sees pictures."""

    def read(
        self, messages: Sequence[Mapping[str, Any]], form: ChatForm, tokenizer: Tokenizer
    ) -> tuple[list[int], PromptImages]:
        """The token ids of a conversation with parts {"type": "image", "image": Picture}, and its images.

        UsageError for a conversation that the chat template does not render with all its pictures.
        """


def from_url(name: str, url: str) -> Picture:
    """The picture of a data URL. name: of the field, for refusals."""
    if url[:8].lower().startswith(("http:", "https:")):
        raise UsageError(f"{name} is a web address, which is not fetched; {ALLOWED}")
    if (match := DATA_URL.match(url)) is None:
        raise UsageError(f"{name}={url!r:.60}; {ALLOWED}")
    return from_base64(name, url[match.end() :])


def from_base64(name: str, text: str) -> Picture:
    """The picture of a file in base64."""
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        raise UsageError(f"{name} has {len(text)} characters; allowed: images of at most {MAX_BYTES >> 20} MiB")
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"{name} is not base64 ({one_line(error)}); {ALLOWED}") from None
    return from_bytes(name, data)


def from_bytes(name: str, data: bytes) -> Picture:
    """The picture of a file's content."""
    if len(data) > MAX_BYTES:
        raise UsageError(f"{name} has {len(data)} bytes; allowed: images of at most {MAX_BYTES >> 20} MiB")
    try:
        from PIL import Image
    except ImportError:
        raise UsageError(f"{name}: images need Pillow; install it with: pip install 'slipstream-lm[vision]'") from None
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:  # decodes nothing but the size
            width, height = image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UsageError(f"{name} is too large ({one_line(error)}); allowed: at most {MAX_PIXELS} pixels") from None
    except Exception as error:  # decoders raise many kinds
        raise UsageError(f"{name} is no image that can be read ({type(error).__name__}); {ALLOWED}") from None
    if width * height > MAX_PIXELS:
        raise UsageError(f"{name} has {width} x {height} pixels; allowed: at most {MAX_PIXELS} in all")
    return Picture(name, data, hashlib.sha256(data).hexdigest())


def picture_of(name: str, part: Mapping[str, Any]) -> Picture:
    """The picture of a message's part.

    It is {"type": "image", "image": ...} with a PIL image, the bytes or the `pathlib.Path` of a file, or a data URL;
    or {"type": "image_url", "image_url": {"url": ...}} with a data URL.
    """
    kind = part["type"]
    value = part.get(kind)
    if kind == "image_url" and isinstance(value, Mapping):
        name, value = f"{name}.url", value.get("url")
    if isinstance(value, Picture):
        return value
    if isinstance(value, str):
        return from_url(name, value)
    if kind == "image" and isinstance(value, bytes | bytearray):
        return from_bytes(name, bytes(value))
    if kind == "image" and isinstance(value, Path):
        try:
            return from_bytes(name, value.read_bytes())
        except OSError as error:
            raise UsageError(f"{name}: {str(value)!r}: {os_reason(error)}; allowed: a file that can be read") from None
    if kind == "image" and value is not None and hasattr(value, "convert") and hasattr(value, "tobytes"):
        pixels = value.convert("RGB")
        return Picture(name, pixels, hashlib.sha256(repr(pixels.size).encode() + pixels.tobytes()).hexdigest())
    more = "a PIL image, bytes, a pathlib.Path, or " if kind == "image" else ""
    raise UsageError(f"{name} is of type {type(value).__name__}; allowed: {more}{ALLOWED.removeprefix('allowed: ')}")


def parts_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The parts of all messages that are pictures, with their names for refusals."""
    for number, message in enumerate(messages):
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list | tuple) else ()):
            if isinstance(part, Mapping) and part.get("type") in KINDS:
                yield f"message {number}, part {place}", part


def with_pictures(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their pictures in parts {"type": "image", "image": Picture}."""
    decoded = {id(part): {"type": "image", "image": picture_of(name, part)} for name, part in parts_of(messages)}
    return [
        {**message, "content": [decoded.get(id(part), part) for part in message["content"]]}
        if isinstance(message.get("content"), list | tuple)
        else dict(message)
        for message in messages
    ]
