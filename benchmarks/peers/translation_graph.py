"""A deep translation model's graph of layers, for benchmarks: GNMT's shape, drawn times.

Eight encoder and eight decoder layers with residual sums, one attention whose context every
decoder layer takes, and a pick of an unused hidden state in front of each. PipeDream's 16-layer
profile has this structure; its file is not ours to ship.
"""

from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.pipeline import DevicePool, PipelineLayer, PipelineProblem, TopologyLevel

ACTIVATION, STATE = 13_107_200, 524_288


class _Graph:
    def __init__(self) -> None:
        self.rows: list[tuple[str, float, float, int, int]] = []
        self.edges: list[tuple[int, int]] = []
        self.number: dict[str, int] = {}

    def add(
        self, name: str, times: tuple[float, float], sizes: tuple[int, int], *parents: str
    ) -> str:
        """A layer of (forward, backward) milliseconds and (activation, weight) bytes."""
        self.number[name] = len(self.rows)
        self.rows.append((name, *times, *sizes))
        self.edges += [(self.number[parent], self.number[name]) for parent in parents]
        return name

    def pick(self, name: str, num_bytes: int, *parents: str) -> str:
        """A layer that only passes on or adds."""
        return self.add(name, (0.0, 0.0), (num_bytes, 0), *parents)


def translation(
    levels: tuple[tuple[int, float], ...], depth: int = 8, **options
) -> PipelineProblem:
    """The graph on one pool; ``depth`` layers each for encoder and decoder."""
    graph = _Graph()
    _decoder(graph, _encoder(graph, depth), depth)
    layers = tuple(
        PipelineLayer(id=name, activation_bytes=activation, weight_bytes=weight)
        for name, _, _, activation, weight in graph.rows
    )
    pool = DevicePool(
        device_type="V100",
        levels=tuple(TopologyLevel(num_components=m, bytes_per_second=b) for m, b in levels),
        forward_seconds=tuple(row[1] / 1e3 for row in graph.rows),
        backward_seconds=tuple(row[2] / 1e3 for row in graph.rows),
    )
    return PipelineProblem(
        model=f"translation{2 * depth}",
        layers=layers,
        edges=tuple(sorted(graph.edges)),
        pools=(pool,),
        microbatch_size=1,
        num_microbatches=16,
        optimizer=named_optimizer("sgd"),
        **options,
    )


def _encoder(graph: _Graph, depth: int) -> str:
    before = graph.add("embedding", (0.1, 25.5), (ACTIVATION, 132_382_720))
    before = graph.add("encoder0", (14.1, 18.0), (2 * ACTIVATION, 67_174_400), before)
    for number in range(1, depth):
        dropped = graph.add(f"encoder{number}.dropout", (0.12, 0.16), (ACTIVATION, 0), before)
        name = f"encoder{number}"
        layer = graph.add(name, (6.9, 13.5), (ACTIVATION + STATE, 33_587_200), dropped)
        output = graph.pick(f"{name}.output", ACTIVATION, layer)
        before = graph.pick(f"{name}.sum", ACTIVATION, output, before)
    return before


def _decoder(graph: _Graph, encoded: str, depth: int) -> None:
    words = graph.add("target", (0.1, 0.5), (ACTIVATION, 132_382_720))
    hidden = graph.pick("hidden", 0)
    state = graph.pick("hidden0", 0, hidden)
    sizes = (2 * ACTIVATION + STATE, 41_979_904)
    attention = graph.add("attention", (15.2, 23.1), sizes, words, state, encoded)
    before = graph.pick("attention.output", ACTIVATION, attention)
    context = graph.pick("attention.context", STATE, attention)
    for number in range(1, depth):
        name = f"decoder{number}"
        dropped = graph.add(f"{name}.dropout", (0.1, 0.26), (ACTIVATION, 0), before)
        joined = graph.pick(f"{name}.joined", ACTIVATION, dropped, context)
        state = graph.pick(f"hidden{number}", 0, hidden)
        sizes = (ACTIVATION + STATE, 50_364_416)
        layer = graph.add(name, (10.6, 18.8 + number), sizes, joined, state)
        output = graph.pick(f"{name}.output", ACTIVATION, layer)
        before = graph.pick(f"{name}.sum", ACTIVATION, output, before)
    graph.add("classifier", (24.8, 5.4), (413_696_000, 132_512_000), before)
