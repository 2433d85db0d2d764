"""Pictures of messages: what is no picture, too large or elsewhere is refused in one line that names the field."""

from __future__ import annotations

import zlib
from base64 import b64encode
from struct import pack
from typing import Any

import pytest
from PIL import Image

from slipstream import UsageError
from slipstream.text.pictures import MAX_BYTES, picture_of
from tests.support.vision_models import picture, png

PNG = png(picture())


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"


def huge(width: int, height: int) -> bytes:
    """A PNG file of a few bytes that claims this size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return pack(">I", len(data)) + name + data + pack(">I", zlib.crc32(name + data))

    header = pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def read(value: Any) -> Any:
    return picture_of("field", {"type": "image", "image": value}).pixels()


@pytest.mark.parametrize(
    "value, message",
    [
        ("https://example.org/a.png", "^field is a web address, which is not fetched; allowed: a PNG"),
        ("picture.png", "^field='picture.png'; allowed: a PNG, JPEG, WebP or GIF image as a data URL"),
        (url(PNG, "application/pdf"), "^field='data:application/pdf"),
        ("data:image/png;base64,???", "^field is not base64"),
        (url(b"hello"), r"^field is no image that can be read \(UnidentifiedImageError\)"),
        (url(PNG[:-40]), "^field is a damaged image"),
        (huge(6000, 6000), "^field has 6000 x 6000 pixels; allowed: at most"),
        (huge(60000, 60000), "^field is too large"),
        (b"\0" * (MAX_BYTES + 1), "^field has .* bytes; allowed: images of at most 20 MiB"),
        ("data:image/png;base64," + "A" * (2 * MAX_BYTES), "^field has .* characters; allowed: images of at most 20"),
        (5, "^field is of type int; allowed: a PIL image, bytes, a pathlib.Path, or a PNG"),
    ],
)
def test_what_is_no_picture_is_refused(value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        read(value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_pictures_become_rgb_and_keep_their_digest() -> None:
    first = picture_of("field", {"type": "image_url", "image_url": {"url": url(PNG)}})
    assert first.digest == picture_of("other", {"type": "image", "image": PNG}).digest
    assert first.digest != picture_of("field", {"type": "image", "image": png(picture(1))}).digest
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 128))
    assert read(png(clear)).mode == read(clear).mode == "RGB"
