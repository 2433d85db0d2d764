"""A conversation with a model and its slash commands; the terminal is in `slipstream.apps.cli.chat`."""
