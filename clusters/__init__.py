"""Many jobs on many devices: who runs where next, simulated and live.

- ``mechanisms``: which job runs on which devices next, as functions of a state, without a clock.
- ``simulator``: a cluster in virtual time. It knows the mechanisms, and no room below.
- ``engines``: where a job's launch runs: this host, Slurm, Ray, rented machines.
- ``scheduler``: a queue of real jobs, by mechanisms and engines.
- ``dashboard``: a web page that shows what the scheduler does.

docs/architecture.md says what each room may import, and ``tests/test_house.py`` holds it.
"""
