"""A scheduler's decisions: which jobs run on which devices next, in virtual or in real time.

Functions of a state: which jobs there are and what they have received, which devices are up.
Nothing here knows a clock, a trace or a process.
"""
