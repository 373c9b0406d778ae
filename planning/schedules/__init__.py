"""Pipeline schedules as data: generators, counters and a timer."""
