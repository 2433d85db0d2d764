"""The applications: the command line, the conversation of `slipstream chat`, and the server."""
