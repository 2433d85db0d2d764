"""An actor of a job over Ray: one decoder, whose batch is kept full with several blocks of lines at a time."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.config import DecoderConfig
from slipstream.errors import SlipstreamError
from slipstream.jobs.job_lines import Line
from slipstream.jobs.line_formats import JobOptions, JobRequest, LineReader
from slipstream.jobs.request_pool import RequestPool, Work
from slipstream.wiring.run_order import first_row, ordered


@dataclass(frozen=True)
class EngineSpec:
    """The arguments from which an actor makes its decoder."""

    target: str
    draft: str | None
    config: DecoderConfig
    options: JobOptions
    threads: int  # PyTorch threads on a CPU; 0 keeps PyTorch's default


class RayEngine:
    """A callable actor: answers blocks of lines, from several threads at once; each call waits for its own lines."""

    def __init__(self, spec: EngineSpec) -> None:
        import torch

        from slipstream.decoder import SpeculativeDecoder

        if spec.threads:
            torch.set_num_threads(spec.threads)
        self._decoder = SpeculativeDecoder(spec.target, spec.draft, **vars(spec.config))
        self._reader = LineReader(self._decoder, spec.options)
        self._pool = RequestPool(self._decoder)
        self._changed, self._tokenizer_lock = threading.Condition(), threading.Lock()
        self._new: list[JobRequest] = []
        self._ended: dict[int, JobRequest] = {}  # by the identity of a request
        self._reported = Work()
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, name="slipstream-engine", daemon=True).start()

    def __call__(self, block: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
        """Answer a block with columns `number` and `line` (JSON); each line gets an answer or a refusal."""
        answers: dict[int, tuple[bool, dict[str, Any]]] = {}
        requests: list[JobRequest] = []
        for number, text in zip(block["number"], block["line"], strict=True):
            line = Line(int(number), json.loads(text))
            try:
                with self._tokenizer_lock:  # threads cannot share a tokenizer
                    requests.append(self._reader.request_of(line))
            except Exception as error:  # of this line; the others go on
                answers[line.number] = False, self._reader.refusal(line, error)
        for request in self._decoded(ordered(requests, first_row, self._decoder.shapes.reuse)):
            try:
                with self._tokenizer_lock:
                    answers[request.line.number] = True, request.answer()
            except Exception as error:  # of this row
                answers[request.line.number] = False, self._reader.refusal(request.line, error)
        numbers = [int(number) for number in block["number"]]
        work = self._new_work()
        return {
            "number": numbers,
            "answered": [answers[number][0] for number in numbers],
            "line": [json.dumps(answers[number][1]) for number in numbers],
            "fingerprint": [self._reader.fingerprint] * len(numbers),
            "work": [json.dumps(vars(work)) if i == 0 else "" for i in range(len(numbers))],
        }

    def _decoded(self, requests: Sequence[JobRequest]) -> list[JobRequest]:
        """Hand requests to the engine and wait for all of them."""
        with self._changed:
            self._new += requests
            self._changed.notify_all()
            while not (self._failure or all(id(request) in self._ended for request in requests)):
                self._changed.wait()
            if self._failure is not None:
                raise SlipstreamError(f"the engine has stopped: {self._failure}") from self._failure
            return [self._ended.pop(id(request)) for request in requests]

    def _new_work(self) -> Work:
        """The work done since the last call."""
        with self._changed:
            before, now = self._reported, Work(**vars(self._pool.work))
            self._reported = now
        return Work(**{name: value - getattr(before, name) for name, value in vars(now).items()})

    def _run(self) -> None:
        """Decode the rows of all blocks, round after round, in the engine's thread."""
        try:
            while True:
                with self._changed:
                    while not (self._new or self._pool.unfinished):
                        self._changed.wait()
                    new, self._new = self._new, []
                self._pool.add(new)
                ended = self._pool.step()
                if ended:
                    with self._changed:
                        self._ended |= {id(request): request for request in ended}
                        self._changed.notify_all()
        except BaseException as error:  # every waiting call must learn of it
            with self._changed:
                self._failure = error
                self._changed.notify_all()
