"""What scripts of the tests compute, kept over restarts and told to workers that join."""


class Log:
    """Numbers in the order in which they came."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict:
        return {"values": self.values}

    def load_state_dict(self, state: dict) -> None:
        self.values = list(state["values"])
