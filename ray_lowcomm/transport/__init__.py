"""How messages travel: `local` (all replicas in one process) and `ray_collective`."""
