"""Lightning under a plan: its Trainer and Fabric get a strategy that trains on this worker's share.

Whatever strategy, devices and accelerator the script names, the strategy here takes their place. It
is Lightning's DDPStrategy. Its loaders give this worker's part of each global batch. The Trainer's
runs the virtual nodes of a training step one after another, and logs the global batch's values.
Lightning would log each worker's own, or their plain mean.
"""

import contextlib
import copy
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ...schema.errors import TargetError
from ...schema.options import option
from ..data import rows_of
from ..nested_tensors import mapped, plain
from ..promise.promise import ignores_targets
from ..sharding.precision import precision_of
from .ddp import cut_loader
from .losses import Known
from .numbers import LOSS, Call, CountedPart, Numbers, ScriptStep, TriedStep, joined, slope_of
from .patching import around, be_one_process, check_version
from .training import ShareSampler, Training, training, warn_of_workers, with_scalars

VERSIONS = ((2, 4), (2, 6))  # the oldest and the newest that were tested
# A module with Trainer or Fabric -> the package that pip knows it by.
_TRAINERS = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch-lightning"}
_FABRICS = {"lightning.fabric": "lightning", "lightning_fabric": "lightning-fabric"}
# Options of a Trainer that is measured: it trains on and on, and does nothing else.
_ENDLESS = {
    "fast_dev_run": False,
    "limit_train_batches": None,
    "limit_val_batches": 0,
    "max_steps": 1_000_000_000,
    "max_time": None,
    "num_sanity_val_steps": 0,
    "overfit_batches": 0.0,
}
_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
}


def adapt(module: Any) -> None:
    """Change the classes of Lightning that a module of it has."""
    name = module.__name__
    if name in _TRAINERS:
        _adapt_trainer(module, _TRAINERS[name])
    else:
        root, strategies = module.__name__, module.strategies
        parents = _parents(root, strategies, _FabricStrategy, _WholeFabric)

        def make(original: Any, self: Any, *values: Any, **options: Any) -> None:
            check_version(_FABRICS[name], VERSIONS)
            warn_of_workers()
            asked = _asked(strategies, "Fabric", options)
            original(self, *values, **{**options, **_in_place_of(parents, asked, options)})
            if os.environ.get("LT_CLI_USED") != "1":  # else it was launched by its command
                self.launch()  # what a script for one device may leave out

        around(module.Fabric, "__init__", make)
        be_one_process(module.Fabric, "world_size")


def _adapt_trainer(module: Any, library: str) -> None:
    root, strategies = module.__name__, module.strategies
    parents = _parents(root, strategies, _TrainerStrategy, _WholeTrainer)

    def make(original: Any, self: Any, *values: Any, **options: Any) -> None:
        check_version(library, VERSIONS)
        warn_of_workers()
        asked = _asked(strategies, "Trainer", options)
        # The script's samplers stay: every worker draws the order of one process.
        options["use_distributed_sampler"] = False
        if training().watcher is not None:
            loggers = import_module(f"{root}.loggers.logger")
            options = {**options, **_ENDLESS, "logger": _dummies(loggers, options.get("logger"))}
        original(self, *values, **{**options, **_in_place_of(parents, asked, options)})

    around(module.Trainer, "__init__", make)
    be_one_process(module.Trainer, "world_size")
    around(module.LightningModule, "log", _log)
    connectors = f"{root}.trainer.connectors.logger_connector.logger_connector"
    around(import_module(connectors)._LoggerConnector, "log_metrics", _to_loggers)
    for name in ("on_train_epoch_start", "on_train_epoch_end", "on_train_end"):
        around(module.callbacks.StochasticWeightAveraging, name, _with_weights)
    writer = module.callbacks.BasePredictionWriter
    around(writer, "on_predict_batch_end", _on_first_worker)
    around(writer, "on_predict_epoch_end", _on_first_worker)
    loops = import_module(f"{root}.loops.prediction_loop")
    around(loops._PredictionLoop, "_get_batch_indices", _whole_indices)
    warnings.filterwarnings("ignore", message="It is recommended to use `self.log")
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")


def _parents(root: str, strategies: Any, strategy: type, whole: type) -> tuple[Any, Any, Any]:
    """The strategies and the environment of one package: it has classes of its own."""
    fabric = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
    environments = import_module(f"{fabric.get(root, root)}.plugins.environments")
    return (
        type(strategy.__name__, (strategy, strategies.DDPStrategy), {}),
        type(whole.__name__, (whole, strategies.SingleDeviceStrategy), {}),
        type("PlanEnvironment", (_Environment, environments.ClusterEnvironment), {}),
    )


def _dummies(loggers: Any, given: Any) -> Any:
    """What takes the place of the loggers of a script that is measured."""
    if given is False:
        return False
    return [loggers.DummyLogger() for _ in (given if isinstance(given, list | tuple) else [given])]


def _asked(strategies: Any, who: str, options: dict[str, Any]) -> dict[str, Any]:
    """What DistributedDataParallel is asked for by the script's own strategy."""
    strategy = options.get("strategy", "auto")
    if isinstance(strategy, str):
        if strategy == "auto":
            return {"find_unused_parameters": True}  # one process has no rule about them
        if strategy.startswith("fsdp") and training().may_share:
            _share_as(strategies.FSDPStrategy(), options.get("precision"))
            return {"find_unused_parameters": True}
        if strategy.startswith("ddp"):
            return {"find_unused_parameters": strategy.endswith("find_unused_parameters_true")}
    elif type(strategy) is strategies.DDPStrategy:
        held = vars(strategy)
        names = ("_ddp_comm_hook", "_ddp_comm_state", "_model_averaging_period")
        asked = dict(held["_ddp_kwargs"])
        if not any(held.get(name) for name in names) and not asked.get("static_graph"):
            return asked
        strategy = "a DDPStrategy with a communication hook, model averaging or static_graph"
    elif type(strategy) is strategies.SingleDeviceStrategy:
        return {"find_unused_parameters": True}
    elif type(strategy) is strategies.FSDPStrategy and training().may_share:
        _share_as(strategy, options.get("precision"))
        return {"find_unused_parameters": True}
    said = strategy if isinstance(strategy, str) else type(strategy).__name__
    raise TargetError(
        f"Lightning's {who} has strategy={said}, and under a plan it trains by "
        "DistributedDataParallel",
        hint='give it strategy="auto" or "ddp"; for "fsdp", solve with ' + option("shard", "all"),
    )


def _share_as(strategy: Any, precision: Any) -> None:
    """Let the plan share states in the blocks and the types that an FSDPStrategy is asked for."""
    sharing, held = training().sharing, vars(strategy)
    if sharing is None:
        return
    wraps = held.get("kwargs", held.get("_fsdp_kwargs", {})).get("auto_wrap_policy")
    sharing.lists = lambda _: wraps or ()
    policy, name = strategy.mixed_precision, str(precision)
    if policy is None and "16" in name:
        package = type(strategy).__module__.rpartition(".strategies.")[0]
        plugins = import_module(f"{package}.plugins.precision.fsdp")
        plugin = plugins.FSDPPrecision(name if "-" in name else f"{name}-mixed")
        policy = plugin.mixed_precision_config
    asked = precision_of(policy)
    sharing.precision = lambda _: asked


def _in_place_of(
    parents: tuple[Any, Any, Any], asked: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """What Trainer or Fabric gets in place of the devices and the strategy that it names."""
    strategy, whole, environment = parents
    device = training().place.device
    plugins = options.get("plugins") or []
    plugins = plugins if isinstance(plugins, list | tuple) else [plugins]
    kept = [plugin for plugin in plugins if not isinstance(plugin, environment.__mro__[2])]
    return {
        "accelerator": device.type,
        "devices": 1,
        "num_nodes": 1,
        "plugins": kept or None,
        "strategy": strategy(parallel_devices=[device], cluster_environment=environment(), **asked)
        if not training().runs_whole
        else whole(device),
    }


class _Environment:
    """The workers of the plan, as Lightning asks for them."""

    creates_processes_externally = True
    main_address, main_port = "", 0  # hetflow has made the process group

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return training().world_size

    def global_rank(self) -> int:
        return training().place.rank

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", training().place.rank))

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", 0))

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass


class _PlanStrategy:
    """What the strategies of Trainer and Fabric have in common, before Lightning's own."""

    distributed_sampler_kwargs = None  # no sampler of Lightning's

    @property
    def root_device(self) -> torch.device:
        """The plan's device; Lightning's would have the number of this worker."""
        return training().place.device

    def _configure_launcher(self) -> None:
        """Start no processes: hetflow has."""

    def setup_environment(self) -> None:
        """Use hetflow's process group, and no second seed: one process does without."""
        accelerator: Any = getattr(self, "accelerator")  # noqa: B009
        accelerator.setup_device(self.root_device)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensor of the whole batch, as in one process: without a dimension of workers.

        Raises:
            TargetError: It has no row for each sample of this worker's batch.
        """
        current = training()
        own = current.piece.own_samples if current.piece is not None else 0
        is_of_all = group in (None, torch.distributed.group.WORLD) and not sync_grads
        if not is_of_all or not tensor.dim() or len(tensor) != max(own, 1):
            raise TargetError(
                "all_gather is given no tensor with a row for each sample of the batch, and "
                "workers have unlike numbers of them",
                hint="gather rows of samples, batch by batch; or sum over workers",
            )
        return current.gathered(tensor)


def _cut(loader: Any, *, needs_all: bool) -> Any:
    """A copy of a script's loader that gives this worker's parts of an order of samples."""
    batches: Any = getattr(loader, "batch_sampler", None)
    said = None
    if isinstance(batches, ShareSampler):
        return loader
    if not isinstance(loader, DataLoader):
        said = f"a {type(loader).__name__} is no DataLoader"
    elif isinstance(loader.dataset, IterableDataset):
        said = "an IterableDataset has no order of samples"
    elif hasattr(loader, "load_state_dict"):
        said = f"a {type(loader).__name__} keeps the position of whole batches"
    elif isinstance(loader.sampler, DistributedSampler):
        said = "a DistributedSampler shares samples out evenly"
    elif batches is None:
        said = "a DataLoader with batch_size=None gives single samples"
    elif needs_all and type(batches) is not BatchSampler:
        said = f"a {type(batches).__name__} may give batches that leave a worker without samples"
    if said is not None:
        raise TargetError(
            f"{said}, so a plan's shares cannot be cut from it",
            hint="use a DataLoader with a batch_size, over a dataset with an index",
        )
    current = training()
    if needs_all and not batches.drop_last:
        last = len(batches.sampler) % batches.batch_size
        if 0 < last < current.world_size:
            raise TargetError(
                f"the last batch of {last} samples leaves a worker of the plan without any",
                hint="give the DataLoader drop_last=True, or another batch_size",
            )
    made = copy.copy(loader)
    cut_loader(
        made,
        ShareSampler(current, batches, dataset=loader.dataset, draws_alike=True, gives_all=True),
    )
    return made


class _Recording:
    """What one call of a step gave: its numbers, and its calls of ``log``."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.scales: Numbers = {}
        self._found: dict[str, Any] = {}

    def note(self, name: str, value: Any) -> str:
        """Keep a number; returns its name, which may be there already."""
        times = sum(known.split("\n")[0] == name for known in self._found)
        key = f"{name}\n{times}" if times else name
        self._found[key] = value.detach().clone() if isinstance(value, Tensor) else value
        return key

    def numbers(self) -> Numbers:
        """The numbers by name, on the host."""
        return dict(zip(self._found, plain(self._found.values()), strict=True))

    def note_loss(self, name: str, loss: Tensor, model: nn.Module) -> None:
        """Keep a loss and its slope; for trials."""
        key = self.note(name, loss)
        slope = slope_of(key, loss, model.parameters())
        self._found |= slope.numbers
        self.scales |= slope.scales


def _log(original: Any, self: Any, *values: Any, **options: Any) -> None:
    """Keep what a step logs, until it is known of the whole batch; other values must be equal."""
    trainer = self._trainer
    strategy = trainer.strategy if trainer is not None else None
    if self._fabric is not None or not isinstance(strategy, _TrainerStrategy):
        original(self, *values, **options)
        return
    given = dict(inspect.signature(original).bind(self, *values, **options).arguments)
    del given["self"]
    strategy.take_log(original, given)


def _to_loggers(original: Any, self: Any, metrics: Any, *values: Any, **options: Any) -> None:
    """Give the loggers hetflow's numbers too; the Trainer's own record of values stays as it is."""
    shown = (
        with_scalars(metrics, training()) if metrics and self.trainer.is_global_zero else metrics
    )
    original(self, shown, *values, **options)
    for name in shown.keys() - metrics.keys():
        self._logged_metrics.pop(name, None)


def _with_weights(original: Any, self: Any, *values: Any, **options: Any) -> None:
    """Run what reads or sets the weights where all of them are here."""
    training().gather_weights()
    original(self, *values, **options)


def _on_first_worker(original: Any, self: Any, trainer: Any, *values: Any, **options: Any) -> None:
    """Write predictions once: all workers have those of the whole batch."""
    if trainer.is_global_zero:
        original(self, trainer, *values, **options)


def _whole_indices(original: Any, self: Any, dataloader: Any) -> Any:
    cuts = getattr(dataloader, "batch_sampler", None)
    if isinstance(cuts, ShareSampler):  # the batches that it has seen are the script's
        dataloader = SimpleNamespace(batch_sampler=cuts.batch_sampler)
    return original(self, dataloader)


def _loss_in(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        said = "no loss" if loss is None else f"a {type(loss).__name__} that is no single number"
        raise TargetError(
            f"training_step returns {said}, and a plan needs a loss for every batch",
            hint="return the loss, or a dict with it as 'loss'",
        )
    return loss


class _TrainerStrategy(_PlanStrategy):
    """Trainer's strategy: Lightning's own, on this worker's share of each batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._steps: dict[str, ScriptStep] = {}
        self._recording: _Recording | None = None
        self._is_trying = False
        self._last: tuple[int, float] = (0, 0.0)
        self._held: list[tuple[Tensor, Tensor]] = []
        self._plain_log: Callable[..., None] = _nothing

    @property
    def _own(self) -> Any:
        """Lightning's methods below those of this class."""
        return super()

    @property
    def _module(self) -> Any:
        return self._own.lightning_module

    def connect(self, model: Any) -> None:
        if getattr(model, "_compiler_ctx", None) is not None:
            raise TargetError(
                "a LightningModule that torch.compile has compiled was not tested under a plan",
                hint="compile its layers in configure_model, or leave torch.compile out",
            )
        self._own.connect(model)
        self._steps = {}

    def setup(self, trainer: Any) -> None:
        # A metric's value of a batch is then the global batch's, where each worker sees its part
        # of it in one call.
        for metric in self._metrics():
            metric.dist_sync_on_step = not training().some_run_parts
        training().num_taken = 0
        _save_nothing(trainer)
        self._own.setup(trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        return _cut(dataloader, needs_all=False)

    def _metrics(self) -> list[Any]:
        from torchmetrics import Metric

        return [module for module in self._module.modules() if isinstance(module, Metric)]

    # Steps

    def training_step(self, *values: Any, **options: Any) -> Any:
        step = self._first_look("training_step", options)
        if not self._module.automatic_optimization:
            return self._by_hand(step, values)
        current, (batch, *rest) = training(), values
        piece = current.piece
        assert piece is not None

        def call(part: Any) -> TriedStep:
            return self._tried("training_step", part, rest)

        step.try_if_due(call, batch)
        ends = current.parts_of(piece)
        shares = [batch]
        if len(ends) > 1:
            shares = [rows_of(batch, piece.own_samples, *part) for part in ends]
        counts = [min(end - start, piece.own_samples) for start, end in ends]
        parts = [CountedPart.of(*entry) for entry in zip(shares, counts, strict=True)]
        weights = step.weights(call, batch, parts)
        recordings, outputs = [], []
        sets_aside = len(parts) > 1 and current.sharing is None  # which does so by itself
        before = self._gradients() if sets_aside else []
        for number, share in enumerate(shares):
            is_last = number == len(shares) - 1
            self._last = counts[number], weights[number]
            waits = contextlib.nullcontext() if is_last else self._own.block_backward_sync()
            with current.part(*self._last), waits:
                recording, output = self._recorded("training_step", (share, *rest))
                loss = _loss_in(output)
                if step.loss_is_mean_over_samples and ignores_targets(loss):
                    raise TargetError(
                        "the cross entropy ignores some targets or weights classes, and no trial "
                        "has shown by what the loss is a mean",
                        hint="name the labels 'labels' in a dict; or train with hf.prepare",
                    )
                recording.note(LOSS, loss)
                if not is_last:
                    self._go_back(loss)
            recordings.append(recording)
            outputs.append(output)
        if before:
            self._held = self._exchange_gradients(before)
        with current.part(*self._last):  # a number that comes first now is tried
            found = self._replay(step, recordings, parts, call, batch)
        return self._output(outputs, counts, found[LOSS])

    def _output(self, outputs: list[Any], counts: list[int], value: float) -> Any:
        """What the last virtual node returns, with the batch's loss and all nodes' other values."""
        own = _loss_in(outputs[-1])
        loss = Known.of(own, 1.0, lambda: torch.full_like(own, value))
        if not isinstance(outputs[-1], dict):
            return loss
        rest = [{k: v for k, v in output.items() if k != "loss"} for output in outputs]
        return {**joined(rest, counts, "training_step returns"), "loss": loss}

    def _go_back(self, loss: Tensor) -> None:
        """The backward pass of a virtual node that is not the last: Lightning runs that one."""
        module = self._module
        if module.trainer.fit_loop._skip_backward:
            return
        scaler = getattr(self._own.precision_plugin, "scaler", None)
        loss = loss / module.trainer.accumulate_grad_batches
        module.backward(loss if scaler is None else scaler.scale(loss))

    def _gradients(self) -> list[tuple[Tensor, Tensor | None]]:
        """Set the gradients of earlier batches aside: Lightning clears or keeps them later."""
        held = [(parameter, parameter.grad) for parameter in self._module.parameters()]
        for parameter, _ in held:
            parameter.grad = None
        return held

    def _exchange_gradients(
        self, before: list[tuple[Tensor, Tensor | None]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Put gradients back that were set aside; returns those that were made since."""
        made = []
        for parameter, gradient in before:
            if parameter.grad is not None:
                made.append((parameter, parameter.grad))
            parameter.grad = gradient
        return made

    def backward(self, closure_loss: Tensor, optimizer: Any, *values: Any, **options: Any) -> Any:
        if self._is_trying:
            assert self._recording is not None
            self._recording.note_loss("the backward pass's loss", closure_loss, self._module)
            return closure_loss
        for parameter, gradient in self._held:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
        self._held = []
        if self._module.automatic_optimization:
            with training().part(*self._last):
                return self._own.backward(closure_loss, optimizer, *values, **options)
        return self._own.backward(closure_loss, optimizer, *values, **options)

    def optimizer_step(
        self, optimizer: Any, closure: Any, model: Any = None, **options: Any
    ) -> Any:
        if self._is_trying:
            return closure()

        def recorded() -> Any:
            training().losses.enter()  # left where an optimizer steps
            return closure()

        return self._own.optimizer_step(optimizer, recorded, model, **options)

    def _by_hand(self, step: ScriptStep, values: tuple[Any, ...]) -> Any:
        """A training step in which the script itself goes back and updates."""
        if training().some_run_parts:
            raise TargetError(
                "manual optimization runs once on a batch, and the plan gives a device several "
                "virtual nodes",
                hint="profile larger batches and solve again, for one virtual node on each device; "
                "or use automatic optimization, which runs them one by one",
            )
        if training().sharing is not None:
            raise TargetError(
                "manual optimization calls parts of the model, and workers share its states",
                hint="use automatic optimization, or solve without " + option("shard"),
            )
        return self._once("training_step", step, values, means="the backward pass's loss")

    def validation_step(self, *values: Any, **options: Any) -> Any:
        step = self._first_look("validation_step", options)
        return self._once("validation_step", step, values)

    def test_step(self, *values: Any, **options: Any) -> Any:
        return self._once("test_step", self._first_look("test_step", options), values)

    def _once(
        self, name: str, step: ScriptStep, values: tuple[Any, ...], *, means: str | None = None
    ) -> Any:
        """Call a step once on this worker's samples; numbers named ``means`` must be means."""
        batch, *rest = values

        def call(part: Any) -> TriedStep:
            return self._tried(name, part, rest)

        if name != "training_step":
            training().gather_weights()  # a step may call a layer of the model
        step.try_if_due(call, batch)
        if means is not None:
            step.check_means(means)
        piece = training().piece
        assert piece is not None
        recording, output = self._recorded(name, values)
        self._replay(step, [recording], [CountedPart.of(batch, piece.own_samples)], call, batch)
        return output

    def predict_step(self, *values: Any, **options: Any) -> Any:
        current = training()
        piece = current.piece
        assert piece is not None
        current.gather_weights()
        own = self._own.predict_step(*values, **options)
        found = current.exchanged(
            (piece.own_samples, mapped(lambda tensor: tensor.detach().cpu(), own))
        )
        counts = [count for count, _ in found if count]
        answers = [answer for count, answer in found if count]
        return joined(answers, counts, "predict_step returns")

    def on_validation_start(self) -> None:
        training().equalise_buffers()
        self._own.on_validation_start()

    # What a step gives

    def _first_look(self, name: str, options: dict[str, Any]) -> ScriptStep:
        """What is known of a step; at first, whether it takes one batch of one loader."""
        current = training()
        step = self._steps.get(name)
        if step is None:
            said = None
            if (
                options
                or "dataloader_iter" in inspect.signature(getattr(self._module, name)).parameters
            ):
                said = "takes the loader's iterator"
            elif current.num_taken != 1 or current.piece is None:
                said = "takes batches of several loaders, or of one without a length"
            if said is not None:
                raise TargetError(
                    f"{name} {said}, and a plan's shares are cut from one batch after another",
                    hint="use one DataLoader of a known length; or train with hf.prepare",
                )
            step = self._steps[name] = ScriptStep(name, current, self._module)
        current.num_taken = 0
        return step

    def _recorded(self, name: str, values: tuple[Any, ...]) -> tuple[_Recording, Any]:
        """Call a step of Lightning's on this worker's samples, and keep what it logs."""
        piece = training().piece
        counts = piece is not None and piece.own_samples > 0
        self._recording = recording = _Recording()
        try:
            with contextlib.nullcontext() if counts else _unsampled(self._metrics()):
                return recording, getattr(self._own, name)(*values)
        finally:
            self._recording = None

    def _tried(self, name: str, part: Any, rest: Any) -> TriedStep:
        """The numbers of some samples; nothing is updated, logged or sent to other workers."""
        module, trains = self._module, name == "training_step"
        self._recording = recording = _Recording()
        try:
            with (
                self._on_trial(),
                torch.set_grad_enabled(trains),
                getattr(self._own.precision_plugin, _CONTEXTS[name])(),
            ):
                output = getattr(module, name)(part, *rest)
                if trains and module.automatic_optimization:
                    recording.note_loss(LOSS, _loss_in(output), module)
            return TriedStep(recording.numbers(), recording.scales)
        finally:
            self._recording = None

    @contextlib.contextmanager
    def _on_trial(self) -> Iterator[None]:
        module, trainer = self._module, self._module.trainer
        loggers = trainer.loggers
        held = [(p, p.requires_grad) for p in module.parameters()]
        # Those of shares do not fit whole parameters, and stay.
        before = self._gradients() if training().sharing is None else []
        groups = [g for optimizer in self._own.optimizers for g in optimizer.param_groups]
        settings = [(g, {k: v for k, v in g.items() if k != "params"}) for g in groups]
        schedulers = [config.scheduler for config in vars(self)["lr_scheduler_configs"]]
        states = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]
        for metric in self._metrics():  # all its attributes are put back after the trial
            metric.reset()
            metric.dist_sync_on_step = False
            metric.distributed_available_fn = bool  # False
        root = type(trainer).__module__.removesuffix(".trainer.trainer")
        dummy = import_module(f"{root}.loggers.logger").DummyLogger
        trainer.loggers = [dummy() for _ in loggers]
        self._is_trying = True
        try:
            yield
        finally:
            self._is_trying = False
            trainer.loggers = loggers
            for parameter, requires_grad in held:
                parameter.requires_grad_(requires_grad)
            self._exchange_gradients(before)
            for scheduler, state in zip(schedulers, states, strict=True):
                scheduler.load_state_dict(state)
            for group, setting in settings:
                group.update(setting)

    def take_log(self, log: Callable[..., None], given: dict[str, Any]) -> None:
        """Keep a call of ``log`` in a step; elsewhere its value must be equal on all workers.

        Raises:
            TargetError: It is not.
        """
        from torchmetrics import Metric

        self._plain_log = log
        value, recording = given["value"], self._recording
        is_number = isinstance(value, Tensor | int | float)
        if recording is not None:
            if is_number:
                given["key"] = recording.note(given["name"], value)
            if given.get("batch_size") is not None:
                key = f"batch_size of {given['name']}"
                given["batch_size_key"] = recording.note(key, given["batch_size"])
            if isinstance(value, Metric) and training().some_run_parts and not self._is_trying:
                _check_on_step(self._module, given)
            recording.calls.append(given)
            return
        if is_number and not given.get("rank_zero_only"):
            check_equal(training(), given["name"], float(value), self._module._current_fx_name)
        self._log(given)

    def _log(self, given: dict[str, Any]) -> None:
        """Log a value that all workers have."""
        module, piece = self._module, training().piece
        if given.get("batch_size") is None and piece is not None:
            given["batch_size"] = piece.num_samples
        self._plain_log(module, **{**given, "sync_dist": False})

    def _replay(
        self,
        step: ScriptStep,
        recordings: list[_Recording],
        parts: list[CountedPart],
        call: Call,
        batch: Any,
    ) -> Numbers:
        """Log what the virtual nodes have logged, with the values of the global batch."""
        numbers = [recording.numbers() for recording in recordings]
        found = step.of_batch(numbers, parts, call, batch)
        for given in recordings[-1].calls:
            key, size_key = given.pop("key", None), given.pop("batch_size_key", None)
            if key is not None:
                value = given["value"]
                given["value"] = (
                    torch.full_like(value.detach(), found[key])
                    if isinstance(value, Tensor) and value.is_floating_point()
                    else torch.tensor(found[key], device=self.root_device)
                )
            if size_key is not None:
                given["batch_size"] = round(found[size_key])
            self._log(given)
        return found

    # Between workers: nothing, while a step is tried on one of them

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return tensor if self._is_trying else super().all_gather(tensor, group, sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._is_trying else self._own.broadcast(obj, src)

    def reduce(self, tensor: Any, *values: Any, **options: Any) -> Any:
        return tensor if self._is_trying else self._own.reduce(tensor, *values, **options)

    def barrier(self, *values: Any, **options: Any) -> None:
        if not self._is_trying:
            self._own.barrier(*values, **options)


def check_equal(current: Training, name: str, value: float, where: str | None) -> None:
    """Refuse a value that is logged outside of steps and is not the same on all workers.

    Raises:
        TargetError: It is not.
    """
    rows = current.numbers_of_all([value])
    if any(row != rows[0] for row in rows) and not all(row[0] != row[0] for row in rows):
        raise TargetError(
            f"{name!r} is logged in {where} and differs between workers, which have their shares "
            "of the samples",
            hint="log it in the step itself, or log a torchmetrics Metric; rank_zero_only=True "
            "logs the first worker's own",
        )


def _check_on_step(module: Any, given: dict[str, Any]) -> None:
    on_step = given.get("on_step")
    if on_step is None:
        on_step = module._current_fx_name == "training_step"
    if on_step and given["value"]._forward_cache is not None:
        raise TargetError(
            f"the metric {given['name']!r} is logged on each step, and the plan gives a device "
            "several virtual nodes, each of which is a call of it",
            hint="log it with on_step=False, on_epoch=True; or solve for one virtual node on each "
            "device",
        )


@contextlib.contextmanager
def _unsampled(metrics: list[Any]) -> Iterator[None]:
    """Let metrics count nothing: the sample only keeps this worker in step with the others."""
    updates = [metric.update for metric in metrics]
    for metric in metrics:
        metric.update = _nothing
    try:
        yield
    finally:
        for metric, update in zip(metrics, updates, strict=True):
            metric.update = update


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _save_nothing(trainer: Any) -> None:
    """Let a Trainer that is measured save no checkpoints."""
    if training().watcher is not None:
        saving = trainer.checkpoint_callbacks
        trainer.callbacks[:] = [kept for kept in trainer.callbacks if kept not in saving]


class _WholeTrainer:
    """Trainer's strategy where one worker has whole batches: Lightning's for one device."""

    def setup(self, trainer: Any) -> None:
        _save_nothing(trainer)
        own: Any = super()
        own.setup(trainer)
        training().train(own.lightning_module)

    def process_dataloader(self, dataloader: Any) -> Any:
        return _cut(dataloader, needs_all=False)

    def training_step(self, *values: Any, **options: Any) -> Any:
        own: Any = super()
        with self._pass():
            training().begin_pass()
            return own.training_step(*values, **options)

    def backward(self, *values: Any, **options: Any) -> Any:
        own: Any = super()
        with self._pass():
            return own.backward(*values, **options)

    def _pass(self) -> Any:
        """A context in which the loss is what it is: there is no other worker's to weigh it by."""
        piece = training().piece
        return training().part(piece.own_samples if piece is not None else 0, 1.0)


class _WholeFabric:
    """Fabric's strategy where one worker has whole batches."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        own: Any = super()
        made: nn.Module = own.setup_module(module)
        training().train_alone(made)
        return made

    def process_dataloader(self, dataloader: Any) -> Any:
        return _cut(dataloader, needs_all=True)


class _FabricStrategy(_PlanStrategy):
    """Fabric's strategy: the loop is the script's own, so its losses are not tried."""

    def process_dataloader(self, dataloader: Any) -> Any:
        return _cut(dataloader, needs_all=True)

    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """The mean over samples of the batch, where Lightning's has one vote for each worker."""
        own: Any = super()
        if str(reduce_op).lower().rsplit(".", 1)[-1] not in ("mean", "avg"):
            training().check_no_idle()
        elif isinstance(tensor, Tensor):
            with torch.no_grad():
                return tensor.copy_(training().mean_of(tensor))
        answer: Tensor = own.all_reduce(tensor, group, reduce_op)
        return answer
