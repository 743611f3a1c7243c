"""A file cut into parts, and the parts' answers put back into one file."""
