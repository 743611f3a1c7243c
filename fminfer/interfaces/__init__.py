"""Python as people of other tools write it."""
