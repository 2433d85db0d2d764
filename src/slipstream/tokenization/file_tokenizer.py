"""A tokenizer of the `tokenizers` package with its special tokens and chat template, read from files.

It has the methods of transformers' `PreTrainedTokenizerFast` that are called here, and takes its place where the files
say everything: transformers takes seconds to import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from slipstream.tokenization.chat_template import rendered

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
TEXT = ("utf-8", "surrogatepass")  # of templates, which keep their line ends; JSON may hold halves of characters
IDENTITY = ("class_name", "add_bos_token", "add_eos_token")  # see `FileTokenizer.standing_for`
ROLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class FileTokenizer:
    """Encodes, decodes, and renders conversations.

    special_tokens_map: texts of tokens by their roles, such as eos_token. infill_names: the tokens that begin a prefix,
    a suffix and the gap between them, if the model's file declares them.
    """

    is_fast = True
    response_template = None
    # of transformers' tokenizer in whose place it stands, if any; `HFTokenizer.digest` has them
    class_name = "FileTokenizer"
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None

    def __init__(
        self,
        backend: Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
        infill_names: Sequence[str] = (),
    ) -> None:
        self.backend_tokenizer, self.chat_template, self.infill_names = backend, chat_template, infill_names
        self.special_tokens_map = {role: special_tokens[role] for role in ROLES if role in special_tokens}
        whole = {token.content for token in backend.get_added_tokens_decoder().values()}
        new = set(self.special_tokens_map.values()) - whole
        backend.add_special_tokens([AddedToken(text, normalized=False) for text in sorted(new)])

    @classmethod
    def read(cls, folder: Path) -> FileTokenizer:
        """The tokenizer that was saved in a folder, by `save` or by transformers."""
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        template = folder / TEMPLATE
        tokens = {role: settings[role] for role in ROLES if settings.get(role) is not None}
        tokenizer = cls(
            Tokenizer.from_file(str(folder / TOKENIZER)),
            {role: token["content"] if isinstance(token, dict) else token for role, token in tokens.items()},
            template.read_bytes().decode(*TEXT) if template.is_file() else settings.get("chat_template"),
            settings.get("infill_names", ()),
        )
        vars(tokenizer).update(settings.get("stands_for", {}))
        return tokenizer

    def standing_for(self, tokenizer: Any) -> FileTokenizer:
        """Itself, in place of this tokenizer of transformers."""
        self.class_name = type(tokenizer).__name__
        self.add_bos_token, self.add_eos_token = (
            getattr(tokenizer, name, None) for name in ("add_bos_token", "add_eos_token")
        )
        return self

    def save(self, folder: Path) -> None:
        """Write the files that `read` and transformers read."""
        self.backend_tokenizer.save(str(folder / TOKENIZER))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "attention_mask"],
            "infill_names": self.infill_names,
            "stands_for": {name: value for name, value in vars(self).items() if name in IDENTITY},
            **self.special_tokens_map,
        }
        (folder / SETTINGS).write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")
        if self.chat_template is not None:
            (folder / TEMPLATE).write_bytes(self.chat_template.encode(*TEXT))

    def enclose(self, *, begins: bool, ends: bool) -> None:
        """Put the tokens of beginning and end around every text that is encoded, where they are known."""
        bos, eos = (self.special_tokens_map.get(role) for role in ("bos_token", "eos_token"))
        first, last = bos if begins else None, eos if ends else None
        parts = [first and f"{first}:0", "$A:0", last and f"{last}:0"]
        second = [first and f"{first}:1", "$B:1", last and f"{last}:1"]
        self.backend_tokenizer.post_processor = TemplateProcessing(
            single=[part for part in parts if part],
            pair=[part for part in (*parts, *second) if part],
            special_tokens=[(text, self.backend_tokenizer.token_to_id(text)) for text in {first, last} if text],
        )

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of these tokens."""
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def get_vocab(self) -> dict[str, int]:
        """Token texts to ids, added tokens included."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The tokens that are matched whole."""
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    @property
    def all_special_tokens(self) -> list[str]:
        """The texts of the tokens that have a role."""
        return list(dict.fromkeys(self.special_tokens_map.values()))

    @property
    def all_special_ids(self) -> list[int]:
        """The tokens that have a role."""
        ids = map(self.backend_tokenizer.token_to_id, self.all_special_tokens)
        return [number for number in ids if number is not None]

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins texts."""
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends texts."""
        return self._id("eos_token")

    @property
    def unk_token_id(self) -> int | None:
        """The token for what no other token spells."""
        return self._id("unk_token")

    def _id(self, role: str) -> int | None:
        text = self.special_tokens_map.get(role)
        number: int | None = None if text is None else self.backend_tokenizer.token_to_id(text)
        return number

    def get_chat_template(self, tools: Any = None) -> str:
        """The chat template. tools: any, since there is one template only. Raises `ValueError` where there is none."""
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template")
        return self.chat_template

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = False,
        **variables: Any,
    ) -> str:
        """The conversation as text; see `chat_template.rendered`. tokenize: False, for the caller encodes the text."""
        if tokenize:
            raise ValueError("tokenize=True; allowed: False")
        return rendered(
            self.get_chat_template(),
            conversation,
            tools=tools,
            opens_answer=add_generation_prompt,
            continues=continue_final_message,
            variables={**self.special_tokens_map, **variables},
        )

    def parse_response(self, response: str, schema: Mapping[str, Any], *, prefix: str, tools: Any = None) -> Any:
        """An answer's message, read by transformers. schema: the form of answers; prefix: the prompt."""
        from transformers import PreTrainedTokenizerBase  # takes seconds

        method: Any = PreTrainedTokenizerBase.parse_response  # it reads nothing of its tokenizer if all is text
        return method(self, response, schema, prefix=prefix, tools=tools)
