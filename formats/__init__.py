"""What comes in and goes out: other tools' files, other launchers, tables and pictures.

- ``importers``: reading others' formats, a file for each.
- ``exporters``: writing them, and what starts a plan on another launcher.
- ``reports``: tables, plots, explanations and timelines for people.

None imports another; all know the records of ``schema``, and reports the schedules.
"""
