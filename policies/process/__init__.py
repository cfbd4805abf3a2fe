"""How our commands end: status, one line of error, Ctrl-C between two steps."""
