"""Check a split whose devices share a model's states, from the definition (docs/sharding.md).

The code is slow and simple on purpose, and shares nothing with the solver or its costs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, inf

from ...schema.options import Shard
from ...schema.plan import Plan, RefutedShares, SharesCertificate
from ...schema.problem import ShardedDevices, ShardedProblem
from ...schema.profile import BatchPoint
from .batch_split import own_faults
from .plan import TOLERANCE, device_faults, differ, question_faults, unlike
from .proofs import Verdict

MOST_STEPS = 3e6
"""Sums of samples that a judge takes to replay a certificate; then the bound is only stated."""


@dataclass(frozen=True)
class _Sharing:
    """What sharing changes: states in bytes per byte of weights, and the seconds of transfers.

    ``gathered`` are the bytes that are whole while their layers run. ``hidden`` are the
    seconds of a round's transfers beside passes, ``bare`` those before and after them, ``once``
    those of a step's end.
    """

    states: Fraction
    gathered: int
    is_in_rounds: bool
    shares_weights: bool
    hidden: float
    bare: float
    once: float

    def step(self, rounds: int, compute: float, end: float) -> float:
        round_seconds = self.bare + (compute if compute > self.hidden else self.hidden)
        return rounds * round_seconds + self.once + end

    def held(self, problem: ShardedProblem, point: BatchPoint, share: int, rounds: int) -> Fraction:
        """Most bytes on a device with the states of ``share`` bytes of weights: pass or update."""
        weights = problem.weight_bytes
        trained = weights - problem.frozen_bytes
        own = Fraction(share, weights)
        passing, updating, first = point.pass_bytes, point.update_bytes, point.first_pass_bytes
        wide = 2 if problem.optimizer.masters else 1  # bytes of a summed gradient, as weights' 1
        between = point.peak_memory_bytes - self.states * (weights - share)
        if wide == 2 and (self.shares_weights or not self.is_in_rounds):
            between -= own * trained  # no weights beside masters; or no sums beside whole gradients
        if passing is None or updating is None:
            return between + self.gathered
        between -= max(passing, updating, point.buffered_pass_bytes or 0)
        pass_bytes = between + self.gathered + passing
        if self.is_in_rounds and point.moments:
            later = trained if rounds == 1 else 0  # what has not come by then is no state yet
            pass_bytes = between + max(
                m.taken_bytes
                + m.gradient_bytes
                + (m.weight_bytes if self.shares_weights else 0)
                - own * wide * max(0, later - m.summed_bytes)
                for m in point.moments
            )
        elif self.is_in_rounds and rounds == 1 and first is not None:
            coming = Fraction(
                max(first, passing) - passing - trained - problem.second_trained_bytes
            )
            pass_bytes += own * max(wide * coming, -self.states * weights)
        reducing = updated = between
        if not self.is_in_rounds:
            edge = min(trained, problem.edge_bytes)
            updated -= trained * (1 - wide * own)
            reducing += max(own * wide * edge, edge - trained * (1 - wide * own))
        most, part = Fraction(wide * updating), problem.optimizer.workspace_bytes_per_weight_byte
        updated += most if part is None else min(most, wide * Fraction(part) * trained * own)
        return max(pass_bytes, reducing, updated)

    def most_share(
        self, problem: ShardedProblem, kind: ShardedDevices, point: BatchPoint, rounds: int
    ) -> int:
        """The most bytes of weights whose states fit beside passes; -1: not even none."""
        low, high = -1, problem.weight_bytes
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.held(problem, point, middle, rounds) <= kind.memory_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def _sharing(problem: ShardedProblem, shard: Shard | None) -> _Sharing:
    state = Fraction(problem.optimizer.state_bytes_per_weight_byte)
    rate, late = problem.bytes_per_second, problem.latency_seconds * problem.num_devices
    trained = problem.weight_bytes - problem.frozen_bytes
    part = Fraction(trained, problem.weight_bytes)
    whole = edge = back = last = 0.0
    if rate is not None:
        whole = problem.num_units * late + problem.weight_bytes / rate
        back = problem.num_units * late + trained / rate
        edge = late + problem.edge_bytes / rate
        last = late + min(problem.edge_bytes, trained) / rate
    weights = min(problem.weight_bytes, problem.gathered_bytes)
    gradients = problem.gathered_trained_bytes
    gradients = min(trained, problem.gathered_bytes if gradients is None else gradients)
    if shard == "all":  # weights come in both passes, gradients go
        bytes_ = weights + gradients
        return _Sharing(
            1 + part * (1 + state), bytes_, True, True, whole + whole + back, edge + last, 0
        )
    if shard == "gradients":
        return _Sharing(part * (1 + state), gradients, True, False, back, last, whole)
    return _Sharing(part * state, 0, False, False, back, last, whole)


def check(plan: Plan, problem: ShardedProblem | None) -> Verdict:
    """List every fault of a plan that shares states; an empty list means that it is valid.

    Without a problem, checks only whether the plan's own values agree with each other.

    Returns:
        One sentence per fault, and how the bound is known.
    """
    faults = [*own_faults(plan), *_share_faults(plan)]
    if problem is None:
        return Verdict(faults)
    faults += question_faults(plan, problem)
    faults += _group_faults(plan, problem)
    stage, trained = plan.stages[0], 1 - problem.frozen_bytes / problem.weight_bytes
    if stage.copied_ratio is not None:
        optimizer = problem.optimizer
        kept = 1 + optimizer.state_bytes_per_weight_byte  # a gradient, states, and for a moment
        kept += (optimizer.workspace_bytes_per_weight_byte or 0.0) * (2 if optimizer.masters else 1)
        ratio = trained * kept + (plan.shard == "all")
        faults += unlike(stage, replace(stage, copied_ratio=ratio), "stages[0].", TOLERANCE)
    if plan.shard not in problem.shards:
        faults.append(f"the plan shares {plan.shard}, the problem asks for {problem.shards}")
    if not faults:
        faults += _prediction_faults(plan, problem)
    bound, stated = plan.proof.lower_bound, plan.proof.certificate
    if faults or bound is None:
        return Verdict(faults)
    if not isinstance(stated, SharesCertificate):
        return Verdict(["proof.certificate: is not of plans that share states"] if stated else ())
    return _replayed(problem, bound, stated)


def _share_faults(plan: Plan) -> Iterator[str]:
    for index, group in enumerate(plan.groups):
        if None in (group.state_share_bytes, group.memory_bytes, group.pass_seconds):
            yield f"groups[{index}]: replicas that share states say share, memory and pass_seconds"
    passes = {group.virtual_nodes for group in plan.groups}
    if plan.shard in ("gradients", "all") and len(passes) > 1:
        yield f"groups: {sorted(passes)} passes, and devices that share {plan.shard} meet in each"
    if plan.objective != "step_seconds":
        yield f"objective is {plan.objective}, plans that share states minimise step_seconds"
    if plan.est is not None or plan.alternatives or plan.sync_bounds:
        yield "est, alternatives, sync_bounds: plans that share states have none"
    if any(group.exposed_seconds is not None for group in plan.groups):
        yield "groups: exposed_seconds is of splits that share no states"


def _group_faults(plan: Plan, problem: ShardedProblem) -> Iterator[str]:
    kinds = {kind.device_type: kind for kind in problem.devices}
    sharing, rounds = _sharing(problem, plan.shard), plan.groups[0].virtual_nodes
    for index, group in enumerate(plan.groups):
        where, kind = f"groups[{index}]", kinds.get(group.device_type)
        if kind is None:
            yield f"{where}: device type {group.device_type!r} is not in the pool"
            continue
        size = group.virtual_node_batch_size
        how = group.activations or "kept"
        point = next((p for h, p in kind.passes if (h, p.batch_size) == (how, size)), None)
        if point is None:
            told = f"a pass of {size} samples with activations {how}"
            yield f"{where}: {told} on {group.device_type} is not profiled"
            continue
        share = group.state_share_bytes or 0
        held = max(0, ceil(sharing.held(problem, point, share, rounds)))
        counted = replace(
            group,
            pass_seconds=point.step_seconds,
            interpolated=size in kind.interpolated_sizes and how == "kept",
            measured_busy=kind.alone is not None,
            pinned_bytes=point.pinned_bytes,
        )
        yield from unlike(group, counted, f"{where}: ", TOLERANCE)
        if group.memory_bytes not in (None, held):
            yield f"{where}: memory_bytes is {group.memory_bytes}, its share makes it {held}"
        if held > kind.memory_bytes:
            yield (
                f"{where}: a pass of {size} samples and a share of {share} bytes need {held} "
                f"bytes on a {group.device_type} of {kind.memory_bytes}"
            )
    yield from device_faults(plan, {name: kind.num_devices for name, kind in kinds.items()})
    shares = sum(group.num_devices * (group.state_share_bytes or 0) for group in plan.groups)
    if shares < problem.weight_bytes:
        yield f"groups: the shares hold the states of {shares} of {problem.weight_bytes} bytes"


def _prediction_faults(plan: Plan, problem: ShardedProblem) -> Iterator[str]:
    sharing, found = _sharing(problem, plan.shard), plan.predicted
    kinds = {kind.device_type: kind for kind in problem.devices}
    compute = max(group.virtual_nodes * (group.pass_seconds or 0.0) for group in plan.groups)
    rounds = plan.groups[0].virtual_nodes if sharing.is_in_rounds else 1
    ends = []
    for group in plan.groups:
        kind, share = kinds[group.device_type], group.state_share_bytes or 0
        ends.append((share / problem.weight_bytes * kind.update_seconds, kind.fixed_seconds))
    step = sharing.step(rounds, compute / rounds, max(map(sum, ends)))
    longest = [end for end in ends if not differ(sum(end), max(map(sum, ends)))]
    told = (found.update_seconds or 0.0, found.fixed_seconds or 0.0)
    stated = (end for end in longest if not any(map(differ, end, told)))  # several may be longest
    update, fixed = next(stated, longest[0])
    counted = replace(
        found,
        step_seconds=step,
        compute_seconds=compute,
        update_seconds=update,
        fixed_seconds=fixed,
        load_seconds=None,
        virtual_node_seconds=None,
        step_seconds_low=None,
        step_seconds_high=None,
    )
    yield from unlike(found, counted, "predicted.", TOLERANCE, 1e-14 * step)


def _replayed(problem: ShardedProblem, bound: float, stated: SharesCertificate) -> Verdict:
    """Replay a certificate: it names every way to share, and none takes less than the bound."""
    batch, left = problem.global_batch_size, MOST_STEPS
    limit = bound * (1 - TOLERANCE)
    for shard in problem.shards:
        sharing = _sharing(problem, shard)
        rooms = [
            [[sharing.most_share(problem, k, p, n) for _, p in k.passes] for k in problem.devices]
            for n in (1, 2)
        ]
        divisors = [n for n in range(1, batch + 1) if batch % n == 0]
        for rounds in divisors if sharing.is_in_rounds else [None]:
            blocks = [one for one in stated.refuted if (one.shard, one.rounds) == (shard, rounds)]
            ceilings = [inf if one.below_seconds is None else one.below_seconds for one in blocks]
            if ceilings != sorted(ceilings) or ceilings[-1:] != [inf]:
                return Verdict([f"proof.certificate: leaves out {shard} in {rounds} rounds"])
            for one, least, ceiling in zip(blocks, [0.0, *ceilings], ceilings, strict=False):
                end = limit - sharing.step(rounds or 1, least, 0.0)
                options = [
                    _options(problem, kind, own, sharing, rounds, limit, ceiling, end)
                    for kind, own in zip(problem.devices, rooms[(rounds or 1) > 1], strict=True)
                ]
                if one.bytes_per_sample is None:
                    done, steps = _reaches(problem, options, batch // (rounds or 1), left)
                    left -= steps
                    if left < 0:
                        return Verdict()
                else:
                    done = not _is_refuted(problem, options, batch // (rounds or 1), one)
                if done:
                    said = f"{shard} in {rounds or 'any'} rounds is not refuted"
                    return Verdict([f"proof.certificate: {said}"])
    return Verdict((), "replayed")


Options = list[tuple[int, int, int]]
"""Samples of a pass, most passes, and the bytes of weights whose states fit beside them."""


def _options(
    problem: ShardedProblem,
    kind: ShardedDevices,
    rooms: list[int],
    sharing: _Sharing,
    rounds: int | None,
    limit: float,
    ceiling: float,
    end: float,
) -> Options:
    """What one device can do in a step within a limit, computing below a ceiling, that ends so."""
    found = []
    batch = problem.global_batch_size
    only = problem.virtual_nodes and batch // problem.virtual_nodes
    left, update = end - kind.fixed_seconds, kind.update_seconds
    if left < 0:
        return []
    updated = (
        problem.weight_bytes if left >= update else floor(left / update * problem.weight_bytes)
    )
    for (_, point), room in zip(kind.passes, rooms, strict=True):
        size = point.batch_size
        if room < 0 or size > batch // (rounds or 1) or only not in (None, size):
            continue

        def fits(passes: int, seconds: float = point.step_seconds) -> bool:
            compute = passes * seconds
            in_time = sharing.step(rounds or 1, compute, kind.fixed_seconds) <= limit
            return compute < ceiling and in_time

        low, high = 0, batch // size if rounds is None else 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        if low:
            found.append((size, low, min(room, updated)))
    return found


def _is_refuted(
    problem: ShardedProblem, options: list[Options], target: int, one: RefutedShares
) -> bool:
    """Whether, at a price of samples, all devices are worth less than the batch and all weights."""
    price, worth = one.bytes_per_sample or 0.0, 0.0
    for kind, own in zip(problem.devices, options, strict=True):
        best = max(
            (share + price * size * n for size, most, share in own for n in (1, most)), default=0.0
        )
        worth += kind.num_devices * max(0.0, best)
    return worth < problem.weight_bytes + price * target


def _reaches(
    problem: ShardedProblem, options: list[Options], target: int, most_steps: float
) -> tuple[bool, float]:
    """Whether devices do exactly so many samples with room for all states; and the work."""
    steps, room = 0.0, {0: 0}  # samples of the devices so far -> most room
    for kind, own in zip(problem.devices, options, strict=True):
        for _ in range(kind.num_devices):
            reached = dict(room)
            for size, most, share in own:
                steps += len(room) * most
                if steps > most_steps:
                    return False, steps
                for samples, held in room.items():
                    for passes in range(1, min(most, (target - samples) // size) + 1):
                        at = samples + passes * size
                        if held + share > reached.get(at, -1):
                            reached[at] = held + share
            room = reached
    return room.get(target, -1) >= problem.weight_bytes, steps
