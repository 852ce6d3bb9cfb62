"""Low-communication distributed training on Ray."""
