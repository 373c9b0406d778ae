"""What an adapter needs of hetflow: this worker's share of each global batch, and its weight.

The script keeps its loop, its wrapped model (DistributedDataParallel) and its optimizer. Every
worker draws the same global batches and keeps its share of each. A worker with n of N samples goes
back from n / N of its loss. So every gradient inside its graph is what one process has there, and
layers that see the whole batch can sum theirs over workers. DistributedDataParallel takes the plain
mean of the workers' gradients, where their sum is the global batch's (VirtualFlow 5.2): so
parameters' gradients count as often as there are workers. A library's adapter says where batches
come from and where results are gathered; nothing is known here of any library.
"""

import functools
import os
import re
import signal
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NoReturn, Protocol
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...devices.backend import Mark, backend_of
from ...schema import files
from ...schema.errors import PeerLostError, TargetError
from ...schema.options import option
from ...schema.plan import Plan
from .. import peers
from ..agreement.agreement import CompareSchedule, KnownParameters, SharedTensors, WorkerComparison
from ..finish import StopRequests, at_exit, leave, meet_all, part, report
from ..gradients import Hooks, ScriptHooks
from ..group import Place, gathered, join, make_group_of_one
from ..log import log, speak
from ..nested_tensors import digest_of, tensors_in
from ..promise.promise import chain
from ..protocol.environment import PLAN, Start, read_environment
from ..session import Session
from ..setup import ELEMENTWISE, final_tensors, keep_freed_memory, skip_overflow
from ..sharding.sliced import plainly
from ..virtual_nodes import batch_sizes_of, holders_of, share_out, slices
from .losses import Losses
from .shared import SharedModels

# The batches of a script that is measured: a profiler chooses their sizes.
#
# The loader that the script trains on never ends. Other loaders give a few samples of each batch,
# so that what a script does before its loop is short.

_MANY = 1_000_000  # batches: no scheduler or loop ends


class Sized:
    """A batch sampler that gives the samples of another one in batches of other sizes.

    Attributes:
        batch_sampler: The script's batch sampler.
        num_samples: Samples of the next batch.
        is_trained_on: Whether the script trains on its batches; then it never ends.
    """

    batch_size, drop_last = None, False

    def __init__(self, batches: Any, few_samples: int) -> None:
        self.batch_sampler, self.num_samples = batches, few_samples
        self.is_trained_on = False

    @property
    def sampler(self) -> Any:
        """The order of the script's samples."""
        return self.batch_sampler.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def __len__(self) -> int:
        return _MANY

    def __iter__(self) -> Iterator[list[Any]]:
        waiting: list[Any] = []
        while True:
            drawn = 0
            for indices in self.batch_sampler:
                drawn += len(indices)
                if not self.is_trained_on:
                    yield list(indices[: self.num_samples])
                    continue
                waiting += indices
                while len(waiting) >= self.num_samples:
                    batch, waiting = waiting[: self.num_samples], waiting[self.num_samples :]
                    yield batch
            if not drawn or not self.is_trained_on:
                return


@dataclass(frozen=True, slots=True)
class BatchPart:
    """This worker's part of one global batch.

    Attributes:
        num_samples: Samples of the global batch, over all workers.
        start: Position of this worker's first sample in it.
        own_samples: This worker's samples; 0 where the batch is too short for all workers.
        batch_size: Samples of the script's full batches; None where its sampler does not say.
        cuts: [virtual nodes of the plan] (start, end) of each one's samples.
        digest: Of the samples' indices: equal on workers that draw the same batch.
        source: Who has drawn it, with the first batch of an epoch.
    """

    num_samples: int
    start: int
    own_samples: int
    batch_size: int | None
    cuts: tuple[tuple[int, int], ...]
    digest: int = 0
    source: "ShareSampler | None" = None

    def of(self, indices: Sequence[Any]) -> list[Any]:
        """This worker's entries of a global batch's; if it has none, one that counts nothing.

        A worker without samples runs its passes too: the others wait for it in their sums.
        """
        return list(indices[self.start : self.start + self.own_samples]) or list(indices[:1])


@dataclass(frozen=True, slots=True)
class Share:
    """A worker's share of global batches; processes that read data for it have it too.

    Attributes:
        sizes: [virtual nodes of the plan] samples of each in a full batch.
        first: The worker's first virtual node.
        last: Its last one; those between are its own as well.
    """

    sizes: tuple[int, ...]
    first: int
    last: int

    def of(self, num_samples: int, batch_size: int | None) -> BatchPart:
        """The worker's part of a global batch of ``num_samples`` samples."""
        cuts = self.cuts(num_samples)
        start, end = cuts[self.first][0], cuts[self.last][1]
        return BatchPart(num_samples, start, end - start, batch_size, tuple(cuts))

    def cuts(self, num_samples: int) -> list[tuple[int, int]]:
        """[virtual nodes] (start, end) of each in a batch; in a short one, none is left out.

        A worker without samples would run one that counts nothing.
        """
        spare = num_samples - len(self.sizes)
        found = slices(num_samples, self.sizes)
        if spare < 0 or all(end > start for start, end in found):
            return found
        more = share_out(spare, self.sizes)
        return list(pairwise([0, *accumulate(1 + size for size in more)]))


class Training:
    """A script's own training under a split plan, as one worker sees it.

    A step: the script takes a batch (``take``), runs passes on it (``begin_pass`` to ``end_pass``),
    and updates. A library that takes batches ahead names each again when it trains on it
    (``begin_batch``), and may cut it into one pass for each virtual node (``part``).

    Attributes:
        place: This worker among the others.
        piece: This worker's part of the batch that the script works on; None before the first.
        pass_samples: This worker's samples in the pass that runs.
        is_going_back: Whether a backward pass runs.
        models: The models that the script trains.
        optimizers: The optimizers that have made an update.
        num_full_steps: Steps that have begun with a full global batch.
        sized: The batches under measurement that the script asked for last; None in a launch.
        watcher: Who measures the script; None in a launch.
        num_taken: Batches that the script has taken since an adapter last looked.
        losses: What shares of the script's losses count.
        sharing: The models whose states the workers share; None where each holds all.
        clock: The times of the steps so far.
        holder: Holds passes to a table of times; None lets them run freely.
        has_skipped: Whether the last update was left out for an overflow on another worker.
        cuts_batches: Whether its library runs a pass for each virtual node.
        took_gradients: Whether the script has asked for gradients without a backward pass.
        known_losses: Nodes of the losses that a library's step may go back from, by a factor; None
            where it may from any.
        loader_batch_size: The batch size of a loader for one worker of several; 0 where loaders
            have the global batch's.
    """

    def __init__(self, start: Start) -> None:
        speak()
        self.watcher = _Process.watcher
        _check_start(start)
        self.place: Place = join(start)
        if not self.place.distributed and self.watcher is None:
            make_group_of_one(self.place)
        if self.place.control is not None:
            self.place.control.close("the script has a training loop of its own")
        self._sizes = batch_sizes_of(self.place)
        holders = holders_of(self.place)
        self._nodes = [node for node, rank in enumerate(holders) if rank == self.place.rank]
        if self._nodes != list(range(self._nodes[0], self._nodes[-1] + 1)):
            raise TargetError("this worker's virtual nodes are not neighbours in the batch")
        self.models = nn.ModuleList()
        self._session = Session(
            self.models,
            (),
            self.place,
            seed=start.seed,
            watch=CompareSchedule(0, watches_first=False),
        )
        self.clock, self.holder = self._session.clock, self._session.holder
        self._is_asked, self._is_held, self._is_reading = False, False, False
        self.sized: Sized | None = None
        self.num_full_steps = 0
        self.optimizers: list[torch.optim.Optimizer] = []
        self.piece: BatchPart | None = None
        self.pass_samples = 0
        self.num_taken = 0
        self._part_weight: float | None = None
        self._num_running = 0
        self._factor: float | Tensor = 1.0
        self._is_nothing: bool | Tensor = False  # whether the share counts nothing
        self.has_skipped = False
        self._scales: list[float] = []  # [workers] in the first pass; 0 without a scaler
        self._num_scaled = 0
        self._unscale: Tensor | None = None
        self.is_going_back = False
        self._is_inside, self._had_idle = False, False
        self._told: list[float | Tensor] | None = None
        self.losses = Losses(self)
        config = start.config
        self.sharing: SharedModels | None = None
        if config is not None and config.shard is not None:
            shares = [slot.state_share_bytes or 0 for slot in config.workers]
            self.sharing = SharedModels(self, config.shard, shares, config.blocks or ())
            self._end_updates_that_fail()
        self.loader_batch_size = 0
        self.took_gradients, self.cuts_batches = False, False
        self.known_losses: set[Any] | None = None
        self._ahead: deque[BatchPart] | None = None
        self._mark: Mark | None = None
        self._is_begun, self._is_counted = False, False
        self._is_finished = False
        self._stops: StopRequests | None = None
        self._trained: dict[int, nn.Parameter] = {}  # by id, and held: an id may come again
        self._own_hooks = Hooks()
        self._script_hooks: list[ScriptHooks] = []  # [models]
        self._reached: set[int] = set()  # numbers of the models that a backward pass goes through
        self._replicas: WeakSet[DistributedDataParallel] = WeakSet()
        self._watch = CompareSchedule(start.compare_every)
        register_optimizer_step_pre_hook(self._stepping)
        register_optimizer_step_post_hook(self._stepped)
        at_exit(self)
        self._finish_before_the_group_ends()

    def _end_updates_that_fail(self) -> None:
        """Let an update that raises end as others do: a script may catch it and go on."""

        def ending(step: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(step)
            def run(*values: Any, **options: Any) -> Any:
                try:
                    return step(*values, **options)
                except BaseException:
                    self._stepped()
                    raise

            return run

        for kind in ELEMENTWISE:  # others are refused
            step: Any = kind.step
            if not hasattr(step, "hooked"):  # as a class's first optimizer does, so that hooks are
                step = torch.optim.Optimizer.profile_hook_step(step)  # within
                step.hooked = True
            kind.step = ending(step)  # type: ignore[method-assign]

    def _finish_before_the_group_ends(self) -> None:
        """Let a script destroy the process group: the end is reported over it first."""
        destroy = dist.destroy_process_group

        @functools.wraps(destroy)
        def destroyed(*values: Any, **options: Any) -> None:
            self.finish()
            if dist.is_initialized():
                destroy(*values, **options)

        dist.destroy_process_group = destroyed

    @property
    def may_share(self) -> bool:
        """Whether FSDP's settings are the plan's: it shares states, or is still to be made."""
        return self.sharing is not None or self.watcher is not None

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self.place.world_size

    @property
    def is_evaluating(self) -> bool:
        """Whether the script evaluates: without gradients, or with all models in that mode."""
        if self._num_running:
            return False
        trains = any(model.training for model in self.models)
        return not torch.is_grad_enabled() or (len(self.models) > 0 and not trains)

    @property
    def global_batch_size(self) -> int:
        """Samples of a full global batch."""
        return sum(self._sizes)

    # Data

    @property
    def share(self) -> "Share":
        """This worker's share of global batches."""
        return Share(tuple(self._sizes), self._nodes[0], self._nodes[-1])

    def resize(self, batch_sizes: Sequence[int]) -> None:
        """Share out global batches of another size from now on, while the script is measured.

        Args:
            batch_sizes: [virtual nodes of all workers] samples of each.
        """
        self._sizes = tuple(batch_sizes)

    def cut(self, num_samples: int, batch_size: int | None, *, by_index: bool = False) -> BatchPart:
        """This worker's part of a global batch of ``num_samples`` samples.

        Args:
            num_samples: Samples of the batch.
            batch_size: Samples of the script's full batches.
            by_index: Whether any samples can be chosen. Then the first shares are made unlike, so
                that a sum over samples does not look like their mean.
        """
        share, sizes = self.share, self._sizes
        is_tried = self.watcher is None and self.place.distributed and self.losses.is_untried
        if by_index and is_tried and len(set(sizes)) == 1 < min(sizes):
            share = Share((sizes[0] - 1, sizes[1] + 1, *sizes[2:]), share.first, share.last)
        return share.of(num_samples, batch_size)

    @property
    def runs_whole(self) -> bool:
        """Whether each global batch is one pass on one worker, as in one process."""
        return len(self._sizes) == 1

    @property
    def scales_differ(self) -> bool:
        """Whether the workers' GradScalers differ, or some have none.

        Each then takes its own scale out of its gradients before they are summed.
        """
        return len(set(self._scales)) > 1

    @property
    def is_between_steps(self) -> bool:
        """Whether no step has begun in which workers that share states have weights by layers."""
        return self.sharing is None or not self.sharing.is_open

    @property
    def some_run_parts(self) -> bool:
        """Whether any device of the plan has several virtual nodes."""
        return len(self._sizes) > self.world_size

    def shares(self, piece: BatchPart) -> list[int]:
        """[workers] samples of each of a global batch."""
        shares = [0] * self.world_size
        for rank, (start, end) in zip(holders_of(self.place), piece.cuts, strict=True):
            shares[rank] += end - start
        return shares

    def parts_of(self, piece: BatchPart) -> list[tuple[int, int]]:
        """[virtual nodes with samples] (start, end) of each within this worker's part."""
        cuts = [piece.cuts[node] for node in self._nodes]
        return [(a - piece.start, b - piece.start) for a, b in cuts if b > a] or [(0, 1)]

    def asking(self, batches: Iterator[Any], cuts: "ShareSampler | None" = None) -> Iterator[Any]:
        """Give a loader's batches, and note whenever the script asks for one.

        Then the last step ends, and the next one begins, if the script trains on the batch.
        """
        sized = None if cuts is None else cuts.sized
        while True:
            self.clock.end_step()
            self.sized = sized
            if self.watcher is not None and sized is not None and sized.is_trained_on:
                self.watcher.asked(self, sized)
            self.clock.asked = self.clock.mark()
            self._begin_hold()
            self._is_asked = True
            try:
                batch = next(batches)
            except StopIteration:
                self._is_reading = False
                return
            shapes = (
                [list(t.shape[1:]) for t in tensors_in(batch)] if self.place.distributed else []
            )
            self.losses.shapes = zlib.crc32(repr(shapes).encode())
            try:
                yield batch
            except GeneratorExit:
                self._is_reading = False
                if self.watcher is not None and sized is not None and sized.is_trained_on:
                    self.watcher.left()
                raise

    def take(self, piece: BatchPart) -> None:
        """Note the part of the batch that the script gets now."""
        self.num_taken += 1
        self._is_reading = True
        if self._ahead is not None:
            self._ahead.append(piece)
        self.begin_batch(piece)
        self._had_idle = self._had_idle or not min(self.shares(piece))
        if not self.is_evaluating and self.watcher is None and self.place.distributed:
            self.losses.begin()

    def check_equal(self, own: int, said: str, *, hint: str) -> None:
        """Check that a number is equal on all workers.

        Raises:
            TargetError: It is not; ``said`` is what that means.
        """
        self.answer()
        if len(set(gathered(torch.tensor([own]), place=self.place).flatten().tolist())) > 1:
            raise TargetError(said, hint=hint)

    @contextmanager
    def taking(self) -> Iterator[deque[BatchPart]]:
        """A context in which batches are taken ahead; it gives their parts, in order."""
        self._ahead, self.losses.is_untried = deque(), False
        try:
            yield self._ahead
        finally:
            self._ahead = None

    # Steps

    def begin_batch(self, piece: BatchPart) -> None:
        """Note the batch that the next passes are of."""
        self.piece, self.pass_samples = piece, piece.own_samples
        self._is_begun, self._is_counted, self._mark = False, False, None

    @contextmanager
    def part(self, num_samples: int, weight: float) -> Iterator[None]:
        """A context for the pass of one of this worker's virtual nodes.

        Args:
            num_samples: Samples of the virtual node.
            weight: What its gradients count in the workers' plain mean.
        """
        self.pass_samples, self._part_weight, self._is_counted = num_samples, weight, False
        self._is_inside = self.cuts_batches = True
        self.losses.skip()
        try:
            yield
        finally:
            self._part_weight, self._is_inside = None, False
            self._had_idle = False  # the library's step has not counted such a sample

    def weigh_part(self, weight: float) -> None:
        """Let the part that runs count so much, as its loss shows; nothing in evaluation."""
        if self._part_weight is not None:
            self._part_weight = weight

    @contextmanager
    def evaluating(self, piece: BatchPart) -> Iterator[None]:
        """A context in which the script computes results of this worker's part of a batch."""
        self.pass_samples, self._is_inside = piece.own_samples, True
        try:
            yield
        finally:
            self._is_inside = False

    def begin_pass(self) -> None:
        """Note that a pass of training begins; the first of a batch begins a step.

        Raises:
            TargetError: No batch of the plan's is there, or the pass has several virtual nodes.
        """
        piece = self.piece
        if piece is None:
            raise TargetError(
                "the script trains on a batch of no loader that hetflow has cut into shares",
                hint="pass the DataLoader to accelerator.prepare, or give it a DistributedSampler",
            )
        if not self._is_begun:
            if _Process.has_split and self.place.distributed:
                raise TargetError(
                    "split_dataset_by_node gives each worker other samples, and a plan's shares "
                    "are cut from global batches",
                    hint="leave it out; hetflow cuts the batches",
                )
            self._check_batch(piece)
            self._check_data(piece)
            is_due = self._watch.is_due(self._session.num_steps)
            if self.place.distributed and self.watcher is None and is_due:
                self.compare()
            self._is_begun = True
            self._session.num_steps += 1
            self.clock.begin_step(is_full=self._is_full(piece))
            self.num_full_steps += self._is_full(piece)
            if self.sized is not None:
                self.sized.is_trained_on = True
            if not self._is_asked:
                self._begin_hold()
            self._is_asked = False
        if self._mark is None:
            self._mark = self.clock.mark()
            if self.holder is not None:
                if self._is_counted:
                    raise TargetError(
                        "the script runs several backward passes on a batch, and an emulated "
                        "device's time for a batch is held in one",
                        hint="launch it on real devices, or train with hf.prepare",
                    )
                self.holder.begin_pass(self.pass_samples)
                self._is_held = True
        if not self.is_going_back:
            self.losses.enter()  # within the closure of an optimizer

    @plainly
    def compare(self) -> None:
        """Compare the workers' models and settings now; call it on all workers.

        Raises:
            TargetError: They have diverged: the script changes something by its own share.
        """
        self.answer()
        parameters = self._parameters()
        known = {id(parameter) for parameter in parameters.values()}
        held = (p for o in self.optimizers for group in o.param_groups for p in group["params"])
        others = [parameter for parameter in held if id(parameter) not in known]
        names = {f"parameter {number} of no model": p for number, p in enumerate(others)}
        comparison = WorkerComparison(
            KnownParameters(self.models, self.optimizers, parameters | names, keeps_groups=False),
            self.optimizers,
            # Of shared states the settings are compared: workers hold other slices.
            shared=lambda: [SharedTensors(None, {} if self.sharing else dict(parameters))],
            place=lambda: self.place,
            watch=self._watch,
        )
        try:
            comparison.compare(self._session.num_steps)
        except TargetError as error:
            raise TargetError(
                str(error),
                hint="let all workers decide alike: sum what is computed from a worker's own share "
                "(a loss before its backward pass, a gradient's norm) over workers first",
            ) from error

    def _check_data(self, piece: BatchPart) -> None:
        """Refuse datasets that the script has split by itself, or drawn by unlike seeds."""
        source = piece.source
        known = self.watcher is not None or not self.place.distributed
        if known or source is None or source.is_checked:
            return
        # Not by the dataset's id: another one may have it later, and not on every worker.
        source.is_checked = True
        told = self.exchanged({**content_of(source.dataset), "the order of samples": piece.digest})
        for name in told[0]:
            if any(of_worker.get(name) != told[0][name] for of_worker in told):
                raise TargetError(
                    f"the workers have unlike data ({name} differs), and a plan's shares are cut "
                    "from batches that all of them draw",
                    hint="give every worker all data, in one order: no part by rank, one seed",
                )

    def _is_full(self, piece: BatchPart) -> bool:
        return piece.num_samples == self.global_batch_size

    def _check_batch(self, piece: BatchPart) -> None:
        if self.watcher is not None:
            return
        size = piece.batch_size or max(piece.num_samples, self.global_batch_size)
        if size != self.global_batch_size:
            raise TargetError(
                f"the script trains on batches of {size} samples, and the plan's global batch has "
                f"{self.global_batch_size}",
                hint=f"solve with {option('batch_size', size)}, or change the script's; "
                "hetflow cuts it "
                "into shares",
            )
        meets = self.sharing is not None and self.sharing.in_rounds and self.some_run_parts
        if meets and piece.num_samples < len(self._sizes):
            raise TargetError(
                f"a batch of {piece.num_samples} samples leaves a virtual node without any, and "
                "workers that share states meet in every pass",
                hint="give the DataLoader drop_last=True",
            )
        if len(self._nodes) > 1 and self._part_weight is None:
            raise TargetError(
                f"the plan gives this device {len(self._nodes)} virtual nodes, and the script's "
                "own loop would run them in one pass, with more memory than planned",
                hint="profile larger batches and solve again, for one virtual node on each device; "
                "or train by the Trainer of transformers or Lightning, or by hf.prepare",
            )

    def end_pass(self) -> None:
        """Note that a pass is done; after a batch's last one gradients are summed."""
        if self._mark is None or self.piece is None:
            return
        self._end_hold()
        if self.sharing is not None:
            self.sharing.end_pass([self.models[number] for number in self._reached])
        self.clock.end_pass(
            self._mark,
            num_samples=0 if self._is_counted else self.pass_samples,
            is_full=self._is_full(self.piece),
        )
        self._mark, self._is_counted = None, True
        self.clock.computed()
        self.clock.synchronised()

    def _begin_hold(self) -> None:
        if self.holder is not None:
            self.holder.begin_step()

    def _end_hold(self) -> None:
        """Wait until the time of an emulated device's pass is over."""
        if self.holder is not None and self._is_held:
            self._is_held = False
            self.holder.end_pass()

    def hold_sums(self, replica: DistributedDataParallel) -> None:
        """Let the last gradients of an emulated device's pass come when its time is over."""
        self._replicas.add(replica)
        if self.holder is not None:
            replica.register_comm_hook(None, self._held_sum)

    def _held_sum(
        self,
        _: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        if bucket.is_last():
            self._end_hold()
        world = dist.group.WORLD
        assert world is not None
        return allreduce_hook(world, bucket)

    @property
    def is_own_pass(self) -> bool:
        """Whether a pass of training runs in a loop that is the script's own."""
        return self._mark is not None and self._part_weight is None

    @contextmanager
    def running(self, *, trains: bool) -> Iterator[None]:
        """A context for a call of a model that DistributedDataParallel synchronises."""
        self.run(trains)
        try:
            yield
        finally:
            self.run(trains, ends=True)

    def run(self, trains: bool, *, ends: bool = False) -> None:
        """Note that a call of such a model begins, or that it ends."""
        self._num_running += -trains if ends else trains

    @property
    def meets_others(self) -> bool:
        """Whether all workers run this layer in training mode now, on parts of one batch.

        A backward pass counts: it runs layers again whose activations were not kept.
        """
        runs = self._num_running > 0 or self.is_going_back
        return self.place.distributed and self.piece is not None and runs

    def is_cut(self, num_samples: int) -> bool:
        """Whether so many samples, in the script's own loop over batches, are this worker's."""
        piece = self.piece
        if piece is None or not (self._is_reading and self.is_in_loop and self.place.distributed):
            return False
        return num_samples == piece.own_samples != piece.num_samples

    def trains_by_itself(self, tensors: Sequence[Any]) -> bool:
        """Whether some are trained parameters, in a pass of the script's own loop."""
        # A trial of a library's step asks for them too, before the step's passes.
        is_own = self.is_own_pass and not self.is_going_back
        if not is_own or self.runs_whole or not self.place.distributed or self.watcher is not None:
            return False
        return any(id(tensor) in self._trained for tensor in tensors)

    @property
    def has_samples(self) -> bool:
        """Whether this worker's samples count in the pass that runs."""
        return self.pass_samples > 0

    @property
    def has_one_sample(self) -> bool:
        """Whether the global batch is one sample."""
        return self.piece is not None and self.piece.num_samples == 1

    @property
    def has_parts(self) -> bool:
        """Whether this worker runs several virtual nodes one after another."""
        return self._part_weight is not None and len(self._nodes) > 1

    @property
    def is_in_loop(self) -> bool:
        """Whether the script's own loop runs, and no part of a library's step."""
        return self._part_weight is None

    @contextmanager
    def weighing(self, losses: Sequence[Tensor]) -> Iterator[None]:
        """A context for a backward pass; afterwards the losses' values are the global batch's.

        Args:
            losses: [losses] those of this worker's share, from which the pass goes back.
        """
        if not self.is_own_pass or self._told is not None or self.runs_whole:
            yield
            return
        self.losses.leave()
        weighed = [self.losses.weighed(loss) for loss in losses]
        self._told = [share for share, _ in weighed]
        try:
            yield
        finally:
            self._told = None
        for loss, (_, value) in zip(losses, weighed, strict=True):
            # Not in place: a graph that is kept may need the old number.
            loss.data = value().to(loss.dtype).view_as(loss)

    def check_tried(self, loss: Tensor) -> None:
        """Check that a library's own step goes back from a loss whose parts were tried.

        Raises:
            TargetError: The script's step computes another, whose parts may not add up to it.
        """
        known = self.known_losses
        if self._part_weight is None or known is None or self.runs_whole:
            return
        if not any(node in known for node in chain(loss)):
            raise TargetError(
                "the training step goes back from a loss that compute_loss did not give, so how "
                "it is made of its parts was not tried",
                hint="compute the whole loss in compute_loss; or train with hf.prepare",
            )

    def weight(self) -> float:
        """What this pass counts in the workers' plain mean."""
        piece = self.piece
        if piece is None:
            return 1.0
        if self._part_weight is not None:
            return self._part_weight
        return piece.own_samples * self.world_size / piece.num_samples

    @contextmanager
    def going_back(self, scaler: "torch.amp.GradScaler | None" = None) -> Iterator[None]:
        """A context for a backward pass, which begins with its share of the batch's loss.

        The script's hooks on parameters are called at its end, with the whole batch's gradient.

        Raises:
            TargetError: A hook changes a gradient that is of several batches, or of a share.
        """
        self.losses.leave()
        self._meet_scalers(scaler)
        hooks = self._script_hooks if self.place.distributed and not self.runs_whole else []
        for of_model in hooks:
            of_model.take()
        are_carried = [of_model.are_carried for of_model in hooks]
        self._reached.clear()
        if self.sharing is not None:
            if any(of_model.held for of_model in hooks):
                raise TargetError(
                    "a parameter has a hook, and workers share its gradient",
                    hint="change gradients after the backward pass; or solve without "
                    + option("shard"),
                )
            self.sharing.before_backward()
        self.is_going_back = True
        try:
            yield
        finally:
            self.is_going_back = False
            self.losses.enter()
            for number, of_model in enumerate(hooks):
                if number not in self._reached or sys.exception() is not None:
                    of_model.put_back()
        is_summed = all(replica.require_backward_grad_sync for replica in self._replicas)
        for of_model, is_carried in zip(hooks, are_carried, strict=True):
            of_model.run(
                "of this worker's samples" if not is_summed else "of several passes" * is_carried
            )

    def _meet_scalers(self, scaler: "torch.amp.GradScaler | None") -> None:
        """Compare the workers' scales in a model's first pass that sums; take this worker's out."""
        if not self.place.distributed or self.piece is None or self.watcher is not None:
            return
        # In none before: workers may have unlike numbers of passes until then.
        if self._num_scaled != len(self.models):  # no pass has summed, or of fewer models
            sums = all(replica.require_backward_grad_sync for replica in self._replicas)
            if self.some_run_parts and not sums:
                return
            self._num_scaled = len(self.models)
            own = scaler.get_scale() if scaler is not None else 0.0
            self._scales = [row[0] for row in self.numbers_of_all([own])]
        if self.scales_differ and self.sharing is not None:
            raise TargetError(
                "the workers' GradScalers differ, or some have none, and they share the states",
                hint="scale on all workers alike, or solve without " + option("shard"),
            )
        if self.scales_differ and self.some_run_parts:
            raise TargetError(
                "the workers' GradScalers differ, or some have none, and they sum parts of batches",
                hint="scale on all workers alike, or solve for one virtual node on each device",
            )
        self._unscale = None
        if self.scales_differ and scaler is not None:
            scale = scaler._get_scale_async()
            assert scale is not None
            self._unscale = scale.double().reciprocal().float()

    def shares_of(self, roots: Sequence[Tensor]) -> list[float | Tensor]:
        """[roots] what each counts in the global batch's loss, in a backward pass of all of them.

        A share is rounded to its root's kind of numbers, and parameters' gradients get what is left
        of it. On a device a share may be a tensor [], for which the host does not wait.
        """
        shares = self._told or [self.weight() / self.world_size] * len(roots)
        # Of shared states gradients are summed.
        times = float(self.world_size) if self.sharing is None else 1.0
        self._factor = times
        self._is_nothing = not any(isinstance(share, Tensor) or share for share in shares)
        if len(roots) == 1 and not self._is_nothing:
            share = torch.as_tensor(shares[0], dtype=torch.float64)
            rounded = share.to(roots[0].dtype)
            self._factor = times * share / rounded
            if isinstance(shares[0], Tensor):
                self._is_nothing, shares = share == 0, [rounded]
            else:
                self._factor, shares = float(self._factor), [float(rounded)]
        return shares

    def train_alone(self, model: nn.Module) -> None:
        """Watch the passes of a model that nothing synchronises, on the only worker."""
        self.train(model)

        def see_pass(module: nn.Module, _: Any) -> None:
            if module.training and torch.is_grad_enabled():
                self.begin_pass()

        model.register_forward_pre_hook(see_pass)

    def train(self, model: nn.Module) -> None:
        """Sum the gradients of a model that DistributedDataParallel takes the mean of."""
        if model not in self.models:  # a script may train a model twice
            self.models.append(model)
        if backend_of(self.place.device).is_host:
            keep_freed_memory()
        for parameter in model.parameters():
            if parameter.requires_grad and id(parameter) not in self._trained:
                hook = functools.partial(self._summed, list(self.models).index(model))
                self._own_hooks.add_on_gradient(parameter, hook)
                self._trained[id(parameter)] = parameter
        self._script_hooks = [ScriptHooks(dict(made.named_parameters())) for made in self.models]

    def _summed(self, number: int, gradient: Tensor) -> Tensor:
        if not self.is_going_back:  # torch.autograd.grad, which changes no .grad
            return gradient
        self._reached.add(number)
        self.begin_pass()  # where the model was in evaluation mode, or two passes end together
        if self._is_nothing is True or not self.has_samples:  # such gradients may be no numbers
            return torch.zeros_like(gradient)
        weighed = gradient * self._factor
        if isinstance(self._is_nothing, Tensor):
            weighed = weighed.masked_fill(self._is_nothing, 0)
        return weighed if self._unscale is None else weighed * self._unscale

    def _stepping(self, optimizer: Any, values: Any, options: Any) -> Any:
        self.end_pass()
        self.losses.leave()
        if self.sharing is not None:
            self.sharing.begin_update()
        closure = options.get("closure", values[1] if len(values) > 1 else None)
        if closure is None:
            self._note_update(optimizer)
            return None

        def closed() -> Any:
            if self.sharing is None:
                found = closure()
            else:
                self.sharing.end_update()  # the script's own code runs
                found = closure()
                self.sharing.begin_update()
            self._note_update(optimizer)
            return found

        rest = {name: value for name, value in options.items() if name != "closure"}
        return (values[0], closed, *values[2:]), rest

    def _stepped(self, *_: Any) -> None:
        if self.sharing is not None:
            self.sharing.end_update()
        self.losses.enter()

    def _note_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer's update, or leave it out where other workers' scalers do."""
        is_unscaled = self.scales_differ and not self._scales[self.place.rank]
        self.has_skipped = is_unscaled and skip_overflow(optimizer)
        if self.has_skipped:
            return
        if not any(known is optimizer for known in self.optimizers):
            self.optimizers.append(optimizer)
            if self.sharing is not None:
                self.sharing.add_optimizer(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = None if id(parameter) in self._trained else parameter.grad
                # Zeros alone make states, alike on all workers: torch's ``get_state_dict`` steps so
                # before a script loads what it has saved.
                if gradient is not None and gradient.any():
                    raise TargetError(
                        f"{type(optimizer).__name__} steps a parameter of no model that is "
                        "synchronised: each worker would train on its own share alone",
                        hint="pass the model to accelerator.prepare or DistributedDataParallel",
                    )

    # Results

    def answer(self) -> None:
        """Give other workers what they ask for of shared states, before workers exchange more."""
        if self.sharing is not None:
            self.sharing.answer()

    def gather_weights(self) -> None:
        """Bring shared weights to every worker, until the next step begins."""
        if self.sharing is not None:
            self.sharing.whole()

    def sum_of(self, own: Tensor) -> Tensor:
        """The sum of a tensor over all workers."""
        self.answer()
        total = own.detach().clone()
        if self.place.distributed:
            peers.all_reduce(total)
        return total

    def numbers_of_all(self, own: Sequence[float]) -> list[list[float]]:
        """[workers][numbers] the numbers of all workers, as many on each."""
        self.answer()
        numbers = torch.tensor(own, dtype=torch.float64)
        rows: list[list[float]] = gathered(numbers, place=self.place).tolist()
        return rows

    def exchanged(self, own: Any) -> list[Any]:
        """[workers] an object of each; for what is seldom exchanged."""
        self.answer()
        found: list[Any] = [None] * self.world_size
        peers.all_gather_object(found, own)
        return found

    def equalise_draws(self) -> None:
        """Give all workers the first worker's stream of random numbers on the host."""
        if not self.place.distributed:
            return
        self.answer()
        state = torch.get_rng_state().to(self.place.device)
        peers.broadcast(state, src=0)
        torch.set_rng_state(state.cpu())

    def gathered(self, tensor: Tensor) -> Tensor:
        """[rows of all workers, ...] tensors of unlike numbers of rows, in order of the batch.

        Raises:
            TargetError: A pass gathers, and workers run unlike numbers of passes.
        """
        if self._part_weight is not None and len(self._sizes) > self.world_size:
            raise TargetError(
                "the loss gathers results of all workers, and the plan gives some of them several "
                "virtual nodes, which run one by one",
                hint="solve for one virtual node on each device",
            )
        self.answer()
        piece, is_scalar = self.piece, tensor.dim() == 0
        own = (tensor[None] if is_scalar else tensor).detach().contiguous()
        # A loss, repeated as often as the script's batch has samples.
        is_repeated = piece is not None and own.shape[0] == piece.batch_size != piece.own_samples
        samples = self.pass_samples if is_scalar else piece and piece.own_samples
        if samples == 0 and (self._is_inside or not is_scalar) and not is_repeated:
            own = own[:0]
        rows = gathered(torch.tensor([len(own)]), place=self.place).flatten().tolist()
        padded = own.new_zeros((max(rows), *own.shape[1:]))
        padded[: own.shape[0]] = own
        found = own.new_empty((self.world_size * max(rows), *own.shape[1:]))
        peers.all_gather(found, padded)
        if piece is not None and found.is_floating_point() and len(set(rows)) == 1:
            weights = found.new_tensor(self.shares(piece)) / piece.num_samples
            if is_scalar or is_repeated:  # what counts nothing may be no number
                found.view(len(rows), -1)[weights == 0] = 0
            if is_scalar:
                return OfWorkers.made(found, weights)
            if is_repeated:
                return torch.einsum(
                    "w,w...->...", weights, found.view(len(rows), -1, *own.shape[1:])
                )
        starts = range(0, len(found), max(rows, default=0) or 1)
        return torch.cat([own[:0], *(found[a : a + n] for a, n in zip(starts, rows, strict=False))])

    def mean_of(self, own: Tensor) -> Tensor:
        """The mean over the batch of what is a mean over each worker's share."""
        piece = self.piece
        share, whole = (
            (1, self.world_size) if piece is None else (piece.own_samples, piece.num_samples)
        )
        return self.sum_of(own * (share / whole) if share else torch.zeros_like(own))

    def check_no_idle(self) -> None:
        """Refuse sums over workers of which one had no sample, and counted another's, lately.

        Raises:
            TargetError: A batch since the last call was too short for all workers.
        """
        if self._had_idle:
            self._had_idle = False
            raise TargetError(
                "a worker had no sample of a short batch and ran another's, which the script's sum "
                "over workers would count twice",
                hint="use accelerator.gather_for_metrics, or a DataLoader with drop_last=True",
            )

    def equalise_buffers(self) -> None:
        """Give all workers the first worker's buffers, as DistributedDataParallel does."""
        self.answer()
        for buffer in self.models.buffers() if self.place.distributed else ():
            held = buffer.to(self.place.device)  # Lightning moves models to the host at the end
            peers.broadcast(held, src=0)
            if held is not buffer:
                buffer.copy_(held)

    # The end

    def note_requests(self) -> None:
        """Note requests to save and leave, for a library that asks for them after each step.

        Only where the launch has --checkpoint: without it a signal ends the workers.
        """
        if self._stops is not None or self.place.start.checkpoint_folder is None:
            return

        def ask() -> None:
            self._session.wants_stop = True

        self._stops = StopRequests([signal.SIGTERM], ask)

    def is_asked_to_stop(self) -> bool:
        """Whether any worker was asked to save and leave; all workers call this together."""
        if self._stops is None:
            return False
        own = torch.tensor(float(self._session.wants_stop), device=self.place.device)
        return bool(self.sum_of(own))

    def leave(self) -> NoReturn:
        """End this worker, which has saved what the script saves."""
        self.clock.end_step()
        self.answer()
        self._is_finished = True
        leave(self._session)

    def abandon(self) -> None:
        """Leave without the other workers: the launch is interrupted."""
        self._is_finished = True

    def finish(self, *, whole: bool = False) -> None:
        """Report what was measured and the digest of the models, and leave the group."""
        if self._is_finished:
            return
        self._is_finished = True
        if self._stops is not None:
            self._stops.close()
        self.losses.end()
        if self.sharing is not None:
            self.sharing.finish()
        session = self._session
        session.is_finished = True
        if self.took_gradients and self.num_taken and not session.num_steps:
            raise TargetError(
                "the script took gradients by torch.autograd.grad or torch.func and went back from "
                "no loss, so each worker trained on its own share",
                hint="call backward on the loss of a model in DistributedDataParallel; or train "
                "with hf.prepare",
            )
        if session.num_steps:
            self._meet_at_end()
            self.equalise_buffers()
            report(session, lambda: digest_of(final_tensors(self.models, self._parameters())))
        part(session)

    def _meet_at_end(self) -> None:
        try:
            meet_all(self._session, lambda wait: wait())  # workers do not change
        except PeerLostError as error:
            if not error.timed_out:
                raise
            raise TargetError(
                f"this worker's script has ended after {self._session.num_steps} steps, and "
                "another worker's has not",
                hint="let all workers leave a loop or a batch alike: sum over workers what "
                "break and continue depend on",
            ) from error

    def _parameters(self) -> dict[str, nn.Parameter]:
        """The models' parameters, under their own names where there is one model."""
        models = list(self.models)
        return dict((models[0] if len(models) == 1 else self.models).named_parameters())


def _check_start(start: Start) -> None:
    config = start.config
    assert config is not None
    said, hint = None, "train with hf.prepare: docs/training.md"
    if config.pipeline is not None:
        said, hint = "this plan is a pipeline", "hetflow solve; or train with hf.prepare"
    elif start.determinism != "none":
        said = f"{option('determinism', start.determinism)} needs sums in a fixed order"
    elif start.checkpoint_every or start.from_scratch:
        said, hint = "hetflow's checkpoints need hf.prepare", "use the library's own checkpoints"
    if said is not None:
        raise TargetError(
            f"a script with its own loop trains under split plans, and {said}", hint=hint
        )


class ShareSampler:
    """A batch sampler that gives this worker's part of each batch of another one.

    Args:
        training: This worker's training.
        batches: The script's batch sampler, equal on every worker.
        dataset: What its batches are indices of; None where it is not known.
        draws_alike: Whether to take the first worker's random stream before each epoch's order.
        gives_all: Whether a worker without samples gets one that counts nothing in evaluation too.

    Attributes:
        batch_sampler: The script's batch sampler.
        is_checked: Whether the workers have compared their datasets.
        sized: Its batches under measurement; None in a launch.
        pieces: The parts of the batches that were drawn and not delivered yet, in order.
    """

    # What accelerate asks of its own sampler: batches are split, and not filled up.
    split_batches, even_batches = True, False

    def __init__(
        self,
        training: Training,
        batches: Any,
        *,
        dataset: Any = None,
        draws_alike: bool = False,
        gives_all: bool = False,
    ) -> None:
        self.dataset, self._draws_alike, self.gives_all = dataset, draws_alike, gives_all
        self.is_checked = False
        self.sized: Sized | None = None
        if training.watcher is not None:
            few_samples = training.watcher.few_samples * training.world_size
            batches = self.sized = Sized(batches, few_samples)
        self._training, self.batch_sampler = training, batches
        self.batch_size: int | None = getattr(batches, "batch_size", None)
        self.drop_last = bool(getattr(batches, "drop_last", False))
        self.num_processes, self.process_index = training.world_size, training.place.rank
        self.pieces: deque[BatchPart] = deque()
        if hasattr(batches, "set_epoch"):  # a loader looks for it here
            self.set_epoch = batches.set_epoch

    @property
    def sampler(self) -> Any:
        """The order of the script's samples."""
        return self.batch_sampler.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[Any]]:
        self.pieces.clear()
        if self._draws_alike:
            self._training.equalise_draws()
        source = None if self.dataset is None else self
        for indices in self.batch_sampler:
            piece = self._training.cut(len(indices), self.batch_size, by_index=True)
            digest = zlib.crc32(repr(indices).encode())
            self.pieces.append(replace(piece, digest=digest, source=source))
            source = None
            yield piece.of(indices)


def checksum(value: Any, before: int = 0) -> int:
    """A checksum of what samples hold, equal in all processes that read the same.

    Pickles of tensors are not. Objects of other types only count by their type.
    """
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, tuple | list):
        for entry in value:
            before = checksum(entry, before)
        return before
    if hasattr(value, "tobytes"):  # arrays, images
        content = value.tobytes()
    else:
        is_plain = isinstance(value, str | bytes | int | float | None)
        content = repr(value if is_plain else type(value)).encode()
    return zlib.crc32(content, before)


def content_of(dataset: Any, depth: int = 2) -> dict[str, int]:
    """Checksums of the length of a dataset, and of its lists' and arrays' first and last entries.

    Nothing is read by the dataset's own methods: these may draw random numbers.
    """
    found = {"its length": len(dataset)} if hasattr(dataset, "__len__") else {}
    if hasattr(dataset, "with_format"):  # of the library datasets
        rows = dataset.with_format(None)
        found["its content"] = checksum([rows[0], rows[-1]]) if len(rows) else 0
        return found
    for name, value in getattr(dataset, "__dict__", {}).items():
        if isinstance(value, list | tuple | Tensor | np.ndarray):
            found[name] = checksum(_ends(value))
        elif depth and hasattr(value, "__getitem__") and hasattr(value, "__dict__"):
            inner = content_of(value, depth - 1)
            found |= {f"{name}, {part}": number for part, number in inner.items()}
    return found


def _ends(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return [list(value.shape), value[0], value[-1]] if value.ndim and len(value) else value
    if isinstance(value, list | tuple):
        return [len(value), *map(_ends, [*value[:1], *value[-1:]])]
    return value


class OfWorkers(Tensor):
    """[workers] a number of each worker's share; its mean is the batch's, as samples count alike.

    Joined to others of its kind, as the losses of an epoch are, it keeps its weights.
    """

    weights: Tensor

    @staticmethod
    def made(values: Tensor, weights: Tensor) -> "OfWorkers":
        """Values with their weights."""
        made = values.as_subclass(OfWorkers)
        made.weights = weights
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, values: Any = (), options: Any = None
    ) -> Any:
        """Call a function of torch's on the plain tensor, except for means and joins."""
        options = options or {}
        first: Any = values[0] if values else None
        if function in (torch.mean, Tensor.mean) and len(values) == 1 and not options:
            plain = first.as_subclass(Tensor)
            return (plain * first.weights).sum() / first.weights.sum()
        joined = function(
            *torch.utils._pytree.tree_map(_plain, values),
            **torch.utils._pytree.tree_map(_plain, options),
        )
        if function is torch.cat and all(isinstance(value, cls) for value in first):
            return cls.made(joined, torch.cat([value.weights for value in first]))
        return joined


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, OfWorkers) else value


class Watcher(Protocol):
    """A profiler in the script's process, which measures the loop from inside of it.

    Attributes:
        few_samples: Samples of a worker's batch before the loop that trains is known.
    """

    few_samples: int

    def asked(self, training: Training, batches: Sized) -> None:
        """The script asks for a batch to train on, and its last step has ended.

        It goes on when this returns. ``batches`` may be given another size, and the training too.
        """
        ...

    def left(self) -> None:
        """The script has left the loop in which it trains, and would go on to what comes after."""
        ...


class _Process:
    """The training of this process, None before the script begins one, and who measures it."""

    training: Training | None = None
    watcher: Watcher | None = None
    has_split = False  # whether the script has given each worker samples of its own


def note_split() -> None:
    """Note that the script has split a dataset between workers by itself: no batch is global."""
    _Process.has_split = True


def watch(watcher: Watcher) -> None:
    """Measure the script that this process will run; it may be one worker by itself."""
    _Process.watcher = watcher


def training() -> Training:
    """This process's training; the first call joins the other workers."""
    if _Process.training is None:
        _Process.training = Training(read_environment())
    return _Process.training


def begun() -> Training | None:
    """This process's training, if the script has begun one through an adapter."""
    return _Process.training


_OF_WORKERS = re.compile(r"WORLD_SIZE|get_world_size\(")


@cache
def warn_of_workers() -> None:
    """Warn once of a script that reads the workers' number past its library, which says 1."""
    current, script = training(), Path(sys.argv[0])
    if current.place.rank or current.world_size == 1 or not script.is_file():
        return
    for number, line in enumerate(script.read_text(errors="replace").splitlines(), 1):
        if found := _OF_WORKERS.search(line.partition("#")[0]):
            log.warning(
                f"{script.name}, line {number} reads {found[0].strip('(')}, and a batch of this "
                "script is one process's: let no rate, accumulation or count of steps follow from "
                "the number of workers"
            )
            return


# What the script's loggers show of a launch: the predicted and measured step, devices' shares.


def with_scalars(values: Mapping[str, Any], training: Training) -> dict[str, Any]:
    """Values that a script logs, with hetflow's beside them.

    Returns:
        The values, and ``hetflow/predicted_step_seconds``, ``hetflow/measured_step_seconds`` (the
        median so far; none in the first step), and ``hetflow/samples_RANK_TYPE``, which is what
        each device has of a full global batch.
    """
    start = training.place.start
    found: dict[str, Any] = dict(values)
    plan = start.plan or _plan_beside(os.environ.get(PLAN, ""))
    if isinstance(plan, Plan) and plan.kind == "split":
        found["hetflow/predicted_step_seconds"] = plan.predicted.step_seconds
    measured = training.clock.timings(wait=False).step_seconds  # does not wait for the device
    if measured is not None:
        found["hetflow/measured_step_seconds"] = measured
    for worker in start.config.workers if start.config is not None else ():
        name = re.sub(r"\W+", "_", worker.device_type)
        samples = sum(node.batch_size for node in worker.virtual_nodes)
        found[f"hetflow/samples_{worker.rank}_{name}"] = samples
    return found


@cache
def _plan_beside(config: str) -> Any:
    """The plan that the launcher keeps beside a launch config; None where this host has none."""
    path = Path(config).with_name("plan.json") if config else Path()
    return files.read_any(path) if path.is_file() else None
