"""Answers that exist already: of equal lines, kept ones, and those to a file that has
changed."""
