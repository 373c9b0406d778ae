"""Pipeline schedules as data: generators, a validator and a timer."""
