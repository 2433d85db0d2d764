"""Slipstream with other libraries' interfaces."""
