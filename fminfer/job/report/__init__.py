"""The report of a run: one HTML file, made from outputs and their status files."""
