"""One module a benchmark: what it measures, its options, and what must hold."""
