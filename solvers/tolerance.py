"""How much slower on paper a plan may be for being simpler.

Plans of one profile are off together: its errors shift them alike, so two plans can be told apart
where neither's step is known so well. An interval says how far the step may be from the truth; as
the measure of what a simpler plan may cost it is too wide (a ResNet-18 pipeline 7 % slower on paper
within an interval of 8 % was 21 % slower in truth: docs/decisions.md).
"""

MOST_GIVEN_UP = 0.02
"""Of the fastest plan's predicted step."""
