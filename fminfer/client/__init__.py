"""Has servers that are elsewhere answer the lines of a run, over HTTP."""
