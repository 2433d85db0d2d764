"""`python -m slipstream`, for where the `slipstream` command is not on the path."""

from slipstream.apps.cli import main

if __name__ == "__main__":
    main()
