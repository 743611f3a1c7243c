"""Who computes it: ranks that meet, pass steps on, and watch each other."""
