"""Jobs of Slurm and LSF, each a `fminfer run`."""
