"""Who trains the runs of a sweep: processes of its own, or jobs of SLURM."""
