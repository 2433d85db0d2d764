"""Slipstream behind other libraries' interfaces."""
