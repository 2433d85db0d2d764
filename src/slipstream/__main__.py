"""The `slipstream` command; `python -m slipstream` runs it where it is not on the path."""

import atexit
import gc
import signal


def main() -> None:
    """Run the command line. Ctrl-C while its modules are imported ends the process at once, without a traceback."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not in the background of a shell
    if handled:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from slipstream.apps.cli import main as run

    if handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(gc.freeze)  # else Python looks through millions of objects several times before it ends
    run()


if __name__ == "__main__":
    main()
