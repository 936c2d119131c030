"""Experiments: each answers one question with a table, a plot and JSON. Run `python -m experiments.NAME --help`."""
