"""Checkers: they verify plans and allocations from the definitions, and import only ``schema``.

Costs, schedule lists, what a list keeps in memory, its times and its parts are counted here. So an
error in a solver, in ``costs`` or in ``schedules`` is found. A plug-in's schedule brings its own
list (``ScheduleTraits.generate``), which is held to its traits and to the rules of any schedule.
"""
