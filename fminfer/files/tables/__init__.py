"""Tables whose rows are answered, and tables with the answers beside their rows."""
