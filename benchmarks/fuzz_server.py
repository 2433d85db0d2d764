"""schemathesis over the server's OpenAPI document: requests that follow it and requests that do not.

    make clients                                   # once: schemathesis in an environment of its own
    python benchmarks/fuzz_server.py --seconds 300

It starts `slipstream serve --target toy` and fails on answers with a 5xx status, on statuses, content types and bodies
that the document does not announce, and on bodies that are taken although the document forbids them. Not among the
checks: that everything the document allows is answered with 200. It cannot say what depends on the model.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

from server_processes import client_program, end_on_signals, slipstream_serve
from terminal import in_one_line, positive

CONFIG = Path(__file__).with_name("schemathesis.toml")
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
ENDLESS = "/v1/slipstream/events"  # a stream that ends with the server


def main(arguments: list[str] | None = None) -> int:
    """Run schemathesis; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=positive, default=300)
    parser.add_argument("--workers", type=positive, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checks", default=",".join(CHECKS))
    given = parser.parse_args(arguments)
    program = client_program("schemathesis", "schemathesis")
    end_on_signals()
    with slipstream_serve(["--target", "toy", "--max-model-len", "512", "--request-timeout", "20"]) as url:
        command = [
            str(program),
            "--config-file",
            str(CONFIG),
            "run",
            f"{url}/openapi.json",
            "--checks",
            given.checks,
            "--exclude-path",
            ENDLESS,
        ]
        command += ["--max-time", str(given.seconds), "--workers", str(given.workers), "--seed", str(given.seed)]
        command += ["--phases", "examples,coverage,fuzzing", "--request-timeout", "30", "--continue-on-failure"]
        command += ["--generation-database", "none", "--warnings", "off"]
        return subprocess.run(command, env=os.environ | {"NO_PROXY": "127.0.0.1"}).returncode


if __name__ == "__main__":
    in_one_line(main)
