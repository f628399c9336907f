"""Measurements: each is a file that prints a table and writes it, with the machine it ran on, into `results/`."""
