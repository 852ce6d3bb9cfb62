"""What `python -m jobs.drill` does."""
