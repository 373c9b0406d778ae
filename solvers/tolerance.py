"""How much slower a simpler plan may be by its prediction.

An error of a profile shifts the predictions of all its plans in the same direction. So two plans
can be told apart even where neither step is known that well. The interval of a prediction is too
wide as a limit on what a simpler plan may cost: a ResNet-18 pipeline 7 % slower on paper within an
interval of 8 % was 21 % slower in truth (docs/decisions.md).
"""

MOST_GIVEN_UP = 0.02
"""Of the fastest plan's predicted step."""
