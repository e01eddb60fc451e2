"""Decoding on this machine."""
