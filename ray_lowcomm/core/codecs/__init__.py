"""What payloads look like: one file a codec, with its wire format in the docstring."""
