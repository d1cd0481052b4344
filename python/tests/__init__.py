"""Tests of the package, with the launcher that `BRIGADE_PROGRAM` names.

`python -m unittest discover --top-level-directory python --start-directory python/tests`
"""
