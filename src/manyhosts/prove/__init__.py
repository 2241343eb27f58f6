"""Tries the promises on one script: runs it with few steps under different settings, compares, and names causes."""
