"""What is the most that a configuration can carry: the highest rate, or the fewest replicas, at which its
objectives hold.

`search` decides what to try next and knows nothing of simulations; `axes` says what a step is and what a
config looks like there; `probe` answers one question, once, and remembers it; `command` does a grid of them.
"""
