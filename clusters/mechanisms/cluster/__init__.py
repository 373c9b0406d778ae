"""The state that decisions are made on: the pool, the jobs present, servers and their devices."""
