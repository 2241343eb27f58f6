"""Weights and programs to use elsewhere, made from a run's snapshot and verified before they appear.

`model_call` finds how the script calls its model, `formats` writes each format, `verify` compares what was written with
the trained model, `export` does it in order. `description` is `export.json`, which serving and deployment read.
"""
