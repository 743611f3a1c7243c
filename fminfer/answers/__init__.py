"""Answers that exist already: of equal lines, kept ones, and those to a changed file."""
