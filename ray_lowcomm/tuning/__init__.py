"""Sweeps with Ray Tune: a trial is a whole fleet inside the trial's own placement group."""
