"""Two engines of one run: one computes prompts and sends them, chunk by chunk, to the one that decodes."""
