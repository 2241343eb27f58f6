"""Hosts as anybody reaches them: addresses, connections, files, disks, versions."""
