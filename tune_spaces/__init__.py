"""Search spaces for Ray Tune, one file each."""
