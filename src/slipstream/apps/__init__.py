"""What users start: the command line and the conversation behind `slipstream chat`."""
