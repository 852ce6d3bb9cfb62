"""Trainers of other libraries as the train loop of a replica. Each module needs its library, and nothing else does."""
