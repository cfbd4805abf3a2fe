"""Several engines of one run: some compute prompts and send them, chunk by chunk, to those that decode."""
