"""Finds which forward shapes give the same bits on this machine."""
