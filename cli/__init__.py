"""One thin module a command: parse, call, check, write."""
