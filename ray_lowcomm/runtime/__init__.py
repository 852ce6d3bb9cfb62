"""The only folder that knows Ray: driver actor, cohorts, workers and the trainer."""
