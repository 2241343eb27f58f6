"""Hosts that ssh reaches, from one terminal."""
