"""A conversation with a model behind OpenAI's API, this project's server or any other. Needs no model here."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.apps.chat.face import Face
from slipstream.apps.chat.remote_api import RemoteApi
from slipstream.apps.chat.remote_options import request_fields
from slipstream.errors import SlipstreamError, UsageError, did_you_mean
from slipstream.sampling.params import SamplingParams

COMMANDS = {"/help": "list the commands", "/reset": "begin anew", "/quit": "leave"}


@dataclass
class RemoteChat:
    """url: of the server, with or without /v1. model: as the server calls it, "" for the first it lists."""

    url: str
    face: Face
    params: SamplingParams
    system: str = ""
    model: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self._options = request_fields(self.params)
        self._api = RemoteApi.at(self.url)
        self.url = self._api.url
        if not self.model:
            listed = self._api.models()
            if not listed:
                raise SlipstreamError(f"{self.url} lists no models; name one with --model")
            self.model = listed[0]

    def handle(self, line: str) -> None:
        """One line of input: a command if it begins with a slash, else what the user says. A failure is one line."""
        text = line.strip()
        try:
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._ask(text)
        except SlipstreamError as error:
            self.face.error(" ".join(str(error).split()))

    def _command(self, name: str) -> None:
        if name == "/reset":
            self.turns.clear()
            self.face.say("begun anew")
        elif name in ("/quit", "/exit"):
            self.closed = True
        elif name == "/help":
            self.face.say("\n".join(f"{known:8} {text}" for known, text in COMMANDS.items()))
        else:
            near = did_you_mean(name, *COMMANDS)
            raise UsageError(f"unknown command {name!r}; allowed with --url: {', '.join(COMMANDS)}{near}")

    def _ask(self, text: str) -> None:
        """Answer `text`; an interrupted answer stays as far as it came, unless nothing came."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        question = {"role": "user", "content": text}
        body = {"model": self.model, "messages": [*said, *self.turns, question], "stream": True}
        pieces, notes = list[str](), list[str]()
        try:
            for piece in self._api.pieces(body | self._options, notes.append):
                pieces.append(piece)
                self.face.piece(piece)
        except KeyboardInterrupt:
            notes.append("interrupted")
        except SlipstreamError:
            if pieces:
                self.face.piece("\n")
            raise
        self.face.piece("\n")
        for line in notes:
            self.face.note(line)
        if pieces:
            self.turns += [question, {"role": "assistant", "content": "".join(pieces)}]
