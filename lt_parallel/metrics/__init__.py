"""Formulas about hardware and models, without torch."""
