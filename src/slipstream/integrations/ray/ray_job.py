"""A job over a Ray cluster: Ray Data hands blocks of lines to actors, and this process writes answers as they finish.

The output is that of a job on one machine, so each kind of job can continue the other's. A job also survives its
driver: Ray stores no state, and the next run asks for the lines that have no answer in the output. If a node dies, Ray
gives its blocks to another one; each line is in one block, so its answer is written once.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import SlipstreamError, first_line
from slipstream.integrations.ray.ray_engine import EngineSpec, RayEngine
from slipstream.integrations.ray.ray_options import RayOptions, ray_module
from slipstream.jobs.batch_job import JobReport, JobState, Progress
from slipstream.jobs.job_lines import JobFiles, Line
from slipstream.jobs.line_formats import RequestDigest

REACHABLE_SECONDS = 10.0  # within which a cluster must accept a connection
BLOCKS_AT_ONCE = 3  # blocks of lines that an actor works on at a time, each as large as its batch


@dataclass
class RayJob:
    """A job whose lines are answered by actors."""

    files: JobFiles
    spec: EngineSpec
    options: RayOptions
    report: JobReport = field(default_factory=JobReport)  # progress so far

    def run(self, on_progress: Progress = lambda report: None) -> JobReport:
        """Answer the lines that no earlier run has answered; SlipstreamError if the cluster fails or cannot be used."""
        ray: Any = ray_module()
        digests = RequestDigest(self.spec.options, self.spec.config.acceptance)
        with JobState(self.files, digests, self.report) as state:
            if lines := {line.number: line for line in state.pending()}:
                with _connected(ray, self.options.ray):
                    try:
                        for block in self._blocks(ray, lines):
                            self._write(state, lines, block)
                            on_progress(state.tick())
                    except ray.exceptions.RayError as error:
                        why = f"Ray failed: {_reason(error)}; finished answers stay in the output"
                        raise SlipstreamError(why) from error
                if lines:
                    raise SlipstreamError(f"Ray lost {len(lines)} lines; run the same command again to answer them")
            state.tick()
        return self.report

    def _blocks(self, ray: Any, lines: Mapping[int, Line]) -> Iterator[Mapping[str, Any]]:
        """Blocks of answers, in the order in which they finish."""
        size = self.spec.config.max_batch_size
        items = [{"number": number, "line": json.dumps(dict(line.item))} for number, line in lines.items()]
        low, high = self.options.actors
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        for name in ("ray", "ray.data"):
            logging.getLogger(name).setLevel(logging.ERROR)
        dataset = ray.data.from_items(items, override_num_blocks=-(-len(items) // size))
        answered = dataset.map_batches(
            RayEngine,
            fn_constructor_args=(self.spec,),
            batch_size=None,
            compute=ray.data.ActorPoolStrategy(
                min_size=low,
                max_size=high,
                max_tasks_in_flight_per_actor=2 * BLOCKS_AT_ONCE,
                max_concurrent_calls_per_actor=BLOCKS_AT_ONCE,
                enable_true_multi_threading=True,
            ),
            num_cpus=self.options.ray_cpus,
            num_gpus=self.options.ray_gpus or None,
        )
        yield from answered.iter_batches(batch_size=None, prefetch_batches=0)

    def _write(self, state: JobState, lines: dict[int, Line], block: Mapping[str, Any]) -> None:
        answers = []
        for i, number in enumerate(map(int, block["number"])):
            line = lines.pop(number, None)
            if line is None:
                continue
            state.expect(str(block["fingerprint"][i]))
            answer = json.loads(block["line"][i])
            if block["answered"][i]:
                answers.append(answer)
            else:
                state.refuse(line, answer)
            if block["work"][i]:
                work = json.loads(block["work"][i])
                for name, count in work.items():
                    setattr(self.report.work, name, getattr(self.report.work, name) + count)
        state.answer(answers, str(block["fingerprint"][0]) if answers else "")


def run_ray_job(
    files: JobFiles, spec: EngineSpec, options: RayOptions, on_progress: Progress = lambda report: None
) -> JobReport:
    """Answer all requests of a job on a cluster."""
    return RayJob(files, spec, options).run(on_progress)


@contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
    """Connect to a cluster inside the block; an existing connection is used and left open."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _check_reachable(address)
    try:
        ray.init(
            address=None if address == "local" else address,
            log_to_driver=False,
            logging_level="ERROR",
            configure_logging=True,
        )
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise SlipstreamError(f"--ray {address!r}: there is no cluster to connect to: {first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """SlipstreamError if nothing listens at the address; Ray would end the whole process, with pages of output."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACHABLE_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise SlipstreamError(f"--ray {address!r}: there is no cluster to connect to: {error}") from error


def _reason(error: BaseException) -> str:
    """The line of a remote failure that gives the reason."""
    cause = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).strip().splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else type(error).__name__
