"""Who runs on what next: decisions of a scheduler, the same in virtual and in real time.

Functions of a state: which jobs there are and what they have received, which devices are up.
Nothing here knows a clock, a trace or a process.
"""
