"""Turn profiles, a pool and options into a plan that is checked and ready to launch.

Its own files build the problem, ask ``hetflow.solvers`` and compare the answers. Beside them:

- ``costs``: the papers' equations, one small cited function each.
- ``schedules``: pipeline schedules as data.
- ``checks``: judges with equations and schedule lists of their own. They import ``schema`` alone.

Solvers import costs and schedules, never planning itself (``tests/test_house.py``).
"""
