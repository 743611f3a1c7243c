"""The report of a run: one HTML file about outputs, made from them and from their
status files."""
