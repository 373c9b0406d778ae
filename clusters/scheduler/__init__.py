"""A live cluster: a queue, rounds on the wall clock, leases, and the file that remembers them."""
