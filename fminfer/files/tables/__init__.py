"""Tables as inputs: their files, their rows, and the request that a template makes of a row."""
