"""Many requests on a running server, good and malformed, a quarter of them given up: what became of them.

    slipstream serve --target toy --port 8000 &
    PYTHONPATH=tests/support python benchmarks/storm_on_server.py http://127.0.0.1:8000 --requests 2000

Each text must be the same every time its request comes; the program ends with code 1 if one is not.
"""

from __future__ import annotations

import argparse
import json
import sys

from server_storm import Storm


def main(arguments: list[str] | None = None) -> int:
    """Run a storm and print its outcomes as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    storm = Storm(given.url, given.requests, given.seed, given.at_once).run()
    differing = sum(len(texts) > 1 for texts in storm.texts.values())
    print(json.dumps(dict(storm.outcomes) | {"bodies": len(storm.texts), "differing": differing}))
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
