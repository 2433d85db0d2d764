"""Reads prompts with images for a vision-language model of transformers.

The model's own vision tower and projector run once per image. Its language model then reads their features in place of
the embeddings of placeholder tokens, so forwards, KV cache and drafts work as for text. Pixels come from the image
processor that needs only Pillow: torchvision's gives slightly different numbers.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from slipstream.core.types import PromptImages
from slipstream.errors import SlipstreamError, UsageError, one_line
from slipstream.models.hf.backend import HFBackend
from slipstream.models.loaded import READS_TEXT, LoadOptions
from slipstream.models.weights.safetensors_files import file_of
from slipstream.text.pictures import MAX_PICTURES, Picture
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from slipstream.tokenization.tokenizer import ChatForm, Tokenizer

KEPT = 64  # images whose features are kept for later turns of their conversations

Inputs = Mapping[str, Any]  # what an image processor returns for one image


def _alone(token: str, count: int, inputs: Inputs) -> str:
    return token * count


def _tiles(token: str, count: int, inputs: Inputs) -> str:
    """Idefics 3: the tiles of an image row by row, then the whole image, each with the same number of tokens."""
    rows, columns = int(inputs["rows"][0][0]), int(inputs["cols"][0][0])
    tile = token * (count // (rows * columns + 1))
    frame, image = "<fake_token_around_image>", "<global-img>"
    lines = (
        "".join(f"{frame}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
        for row in range(rows)
    )
    return "".join(lines) + "\n" * (rows > 0) + f"{frame}{image}{tile}{frame}"


def _framed(token: str, count: int, inputs: Inputs) -> str:
    """The text of an image for Gemma 3."""
    return f"\n\n<start_of_image>{token * count}<end_of_image>\n\n"


@dataclass(frozen=True)
class Family:
    """How the models of a family read images."""

    # the text of an image's tokens, in place of the template's mark
    spelled: Callable[[str, int, Inputs], str] = _alone
    options: tuple[str, ...] = ()  # options of the image processor to set to True
    has_grid: bool = False  # rotary positions of an image follow its rows and columns
    sees_ahead: bool = False  # the tokens of an image see each other
    mark: str = ""  # of an image in the template, if it is not the image token


FAMILIES = {
    "llava": Family(),
    "idefics3": Family(_tiles, ("return_row_col_info",)),
    "smolvlm": Family(_tiles, ("return_row_col_info",)),
    "qwen2_vl": Family(has_grid=True),
    "qwen2_5_vl": Family(has_grid=True),
    "gemma3": Family(_framed, sees_ahead=True, mark="<start_of_image>"),
}


@dataclass(frozen=True)
class ImageFeatures:
    """An image as the language model reads it."""

    features: Tensor  # [tokens, H]
    text: str  # that spells its tokens
    grid: tuple[int, int] | None  # rows and columns of the features, if rotary positions follow them


class HFVision:
    """The vision of a model; see `Vision`."""

    def __init__(self, model: Any, folder: str, files: Mapping[str, Any], family: Family) -> None:
        """folder, files: of the image processor, which is loaded with the first image."""
        self._model, self._folder, self._files, self._family = model, folder, files, family
        self._token_id: int = model.config.image_token_id
        self._accepted = inspect.signature(model.get_image_features).parameters
        self._features = OrderedDict[str, ImageFeatures]()
        self._lock = threading.Lock()  # a server reads requests in several threads

    def chat_template(self) -> str | None:
        """The template in chat_template.json, where older processors keep it; tokenizers do not read that file."""
        file = file_of(self._folder, "chat_template.json", self._files)
        try:
            return None if file is None else str(json.loads(file.read_text(encoding="utf-8"))["chat_template"])
        except (ValueError, LookupError, TypeError) as error:
            raise SlipstreamError(f"chat_template.json of model {self._folder!r}: {one_line(error)}") from error

    def read(
        self, messages: Sequence[Mapping[str, Any]], form: ChatForm, tokenizer: Tokenizer
    ) -> tuple[list[int], PromptImages]:
        assert isinstance(tokenizer, HFTokenizer)
        token: str = tokenizer.inner.convert_ids_to_tokens(self._token_id)
        mark = self._family.mark or token
        pictures, text = [picture for message in messages for picture in _pictures(message)], None
        if len(pictures) > MAX_PICTURES:
            raise UsageError(f"the conversation has {len(pictures)} images; allowed: at most {MAX_PICTURES}")
        contents_in_parts = [_in_parts(message) for message in messages]  # these templates expect parts
        for written in (contents_in_parts, [_without_pixels(message) for message in messages]):
            try:
                text = tokenizer.chat_text(written, form)
            except UsageError as error:
                refusal = error
                continue
            if text.count(mark) == len(pictures):
                break
        if text is None:
            raise refusal
        before, *texts = text.split(mark)
        if len(texts) != len(pictures):
            raise UsageError(
                f"the chat template writes {mark!r} {len(texts)} times for {len(pictures)} images; allowed: images "
                "where the template shows them, and no text that contains this token"
            )
        images = [self._image(picture, token) for picture in pictures]
        ids = tokenizer.bare(before + "".join(image.text + text for image, text in zip(images, texts, strict=True)))
        return ids, self._placed(ids, pictures, images)

    def _placed(self, ids: Sequence[int], pictures: Sequence[Picture], images: Sequence[ImageFeatures]) -> PromptImages:
        places = [place for place, token in enumerate(ids) if token == self._token_id]
        features = torch.cat([image.features for image in images])
        if len(places) != len(features):
            raise UsageError(
                f"the images have {len(features)} tokens, but the tokenizer makes {len(places)} of them; allowed: a "
                "tokenizer with the tokens of this model's images"
            )
        digests: dict[int, str] = {}
        blocks: list[tuple[int, int]] = []
        first = 0
        for picture, image in zip(pictures, images, strict=True):
            digests[places[first]] = picture.digest
            first += len(image.features)
            if self._family.sees_ahead:
                blocks.append((places[first - len(image.features)], places[first - 1] + 1))
        rotations = self._rotations(len(ids), list(digests), images) if self._family.has_grid else None
        device = features.device
        return PromptImages(digests, torch.tensor(places, device=device), features, rotations, tuple(blocks))

    def _rotations(self, length: int, starts: Sequence[int], images: Sequence[ImageFeatures]) -> Tensor:
        """Rotary positions of time, height and width [3, length], as in section 2.1 of the Qwen2-VL report.

        A text token has one position for all three. All tokens of an image have the time of its first token; height and
        width count rows and columns from there. The text continues after the largest of these.
        """
        pieces, end, position = list[Tensor](), 0, 0
        for start, image in zip(starts, images, strict=True):
            assert image.grid is not None
            pieces.append(torch.arange(position, position + start - end).expand(3, -1))
            position += start - end
            rows, columns = torch.meshgrid(*map(torch.arange, image.grid), indexing="ij")
            pieces.append(torch.stack([torch.zeros_like(rows), rows, columns]).flatten(1) + position)
            position += max(image.grid)
            end = start + len(image.features)
        pieces.append(torch.arange(position, position + length - end).expand(3, -1))
        return torch.cat(pieces, dim=1).to(images[0].features.device)

    def _image(self, picture: Picture, token: str) -> ImageFeatures:
        """A picture's features, computed once and kept."""
        with self._lock:
            if picture.digest not in self._features:
                self._features[picture.digest] = self._computed(picture, token)
                if len(self._features) > KEPT:
                    self._features.popitem(last=False)
            self._features.move_to_end(picture.digest)
            return self._features[picture.digest]

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(self._folder, **self._files, backend="pil")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            raise UsageError(
                f"the image processor of model {self._folder!r} could not be loaded: {one_line(error)}; allowed: a "
                "model with its preprocessor_config.json"
            ) from error

    @torch.inference_mode()
    def _computed(self, picture: Picture, token: str) -> ImageFeatures:
        options, pixels = dict.fromkeys(self._family.options, True), picture.pixels()
        try:
            inputs = self._processor(images=[pixels], return_tensors="pt", **options)
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:  # such as extreme aspect ratios
            raise UsageError(
                f"{picture.name} of {pixels.width} x {pixels.height} pixels: {one_line(error)}; allowed: images that "
                "the model's image processor takes"
            ) from error
        tensors = {name: value.to(self._model.device) for name, value in inputs.items() if name in self._accepted}
        tensors["pixel_values"] = tensors["pixel_values"].to(self._model.dtype)
        features = self._model.get_image_features(**tensors, return_dict=True).pooler_output
        features = torch.cat(tuple(features)) if isinstance(features, list | tuple) else features.flatten(0, 1)
        grid = None
        if self._family.has_grid:
            _, rows, columns = inputs["image_grid_thw"][0].tolist()
            merged: int = self._processor.merge_size
            grid = rows // merged, columns // merged
        return ImageFeatures(features, self._family.spelled(token, len(features), inputs), grid)


def _pictures(message: Mapping[str, Any]) -> list[Picture]:
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    return [part["image"] for part in parts if part.get("type") == "image"]


def _without_pixels(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with names in place of pictures, since some templates print the picture object."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    return {**message, "content": [{"type": "image"} if part.get("type") == "image" else part for part in content]}


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    named = _without_pixels(message)
    if isinstance(text := named.get("content"), str):
        named["content"] = [{"type": "text", "text": text}]
    return named


def vision_of(folder: str | None, backend: Any, options: LoadOptions) -> HFVision | str:
    """The vision of a model, or the reason it takes no images. folder: None for a model that the caller loaded."""
    model = backend.model
    kind = model.config.model_type
    if getattr(model.config, "vision_config", None) is None:
        return READS_TEXT
    if kind not in FAMILIES:
        return f"images are not supported for models of type {kind!r}, only for {', '.join(FAMILIES)}"
    if folder is None:
        return "it was loaded by the caller; images need its folder or hub id in place of the model"
    if not isinstance(backend, HFBackend):
        return "its forwards are captured as CUDA graphs or run on a cache of its own; fast=False avoids the former"
    return HFVision(model, folder, options.files, FAMILIES[kind])
