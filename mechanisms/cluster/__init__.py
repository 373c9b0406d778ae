"""What decisions are about: the pool, the jobs present, servers and the devices on them."""
