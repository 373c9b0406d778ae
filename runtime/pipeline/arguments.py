"""The arguments of a call of the model, by the names that tracers give their inputs."""

import inspect
from typing import Any

_PREFIX: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}
_PLAIN = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def by_placeholder(
    signature: inspect.Signature, arguments: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Any]:
    """The value that a call gives each input of a traced model, defaults included.

    torch.fx has one input for ``**extra``, and torch.export one for each of its entries: the result
    has both.
    """
    parameters = signature.parameters
    if not named and len(arguments) == len(parameters):
        if all(parameter.kind in _PLAIN for parameter in parameters.values()):
            return dict(zip(parameters, arguments, strict=True))
    bound = signature.bind(*arguments, **named)
    bound.apply_defaults()
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = parameters[name].kind
        found[_PREFIX.get(kind, "") + name] = value
        if kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
    return found
