"""Trials: one script started again and again, for `prove`, `plan`, `study` and `tune`.

`runs` starts each as an ordinary `manyhosts run`, on any launcher, several at once. `forked` starts workers on this
machine alone, in 0.05 s, from one process with torch loaded: for trials that need neither recovery nor other hosts.
"""
