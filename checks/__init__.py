"""Checkers: they verify plans and allocations from the definitions and never import a solver.

They import the record classes (``schema``) and, of ``schedules``, only what makes a pipeline's list
of operations and what validates such a list from its definitions. What a list keeps in memory, its
times and its parts are counted here, and so are all costs. So an error in a solver, in ``costs`` or
in the counters and timers of ``schedules`` is found; a list that is valid, but is not the one that
the schedule's name promises, is not.
"""
