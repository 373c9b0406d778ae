"""The requests about this machine: measure a model, find what is lacking, train for show."""

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from ..options import Option, Precision

if TYPE_CHECKING:
    from pathlib import Path

    from .kinds import Callable, Count, Profile, Sequence, SyncDevices


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What ``profile`` needs to know."""

    target: Annotated[
        str,
        Option(
            argument=True,
            help="train.py (your script as it is), file.py:factory, zoo:NAME, "
            "hf:CONFIG_OR_DIR[@LENGTH] or torchvision:NAME.",
            python="A script is run until its loop has been measured. LENGTH is the tokens of a "
            "sample, or the pixels of an image's side.",
        ),
    ]
    devices: Annotated[
        "Sequence[str]",
        Option(
            flag="--device",
            help="Device type (repeatable): V100, cuda:0, cpu, cpu:slow=0.25; or spec:H100, "
            "which need not be here: it is estimated.",
            python="Empty: every type of GPU here, or the processor where there is none.",
        ),
    ] = ()
    _: KW_ONLY
    arguments: Annotated[
        "Sequence[str]", Option(argument=True, help="The script's own arguments, after --.")
    ] = ()
    batch_sizes: Annotated[
        "Sequence[Count] | str | None",
        Option(help="Sizes 8,48,256 or a range 8-256; default: grow from 1."),
    ] = None
    max_batch_size: Annotated["Count | None", Option(help="Largest batch size to try.")] = None
    steps: Annotated["Count | None", Option(help="Largest number of repeats of one size.")] = None
    effort: Annotated[
        Literal["quick", "usual", "thorough"],
        Option(
            help="How narrow the confidence intervals must be, and how long measuring may take."
        ),
    ] = "usual"
    optimizer: Annotated[
        str | None,
        Option(
            help="The optimizer that will train, where the target brings none: sgd, "
            "sgd-momentum, adam, adamw, ...",
            default="sgd-momentum; the profile says that it is only the default",
        ),
    ] = None
    links: Annotated[
        bool | None,
        Option(
            help="Measure the link between two devices, and all-reduces over sizes. Without "
            "either flag: the link where there are {layers}."
        ),
    ] = None
    layers: Annotated[bool, Option(help="Profile each layer too, for pipeline plans.")] = False
    microbatch_sizes: Annotated[
        "Sequence[Count]",
        Option(
            flag="--microbatch-size", help="Samples of a microbatch, for {layers}; several: 4,8,16."
        ),
    ] = (8,)
    recompute: Annotated[
        bool,
        Option(
            help="Profile passes with repeated layers recomputed too, for splits that share states."
        ),
    ] = False
    offload: Annotated[
        bool,
        Option(
            help="The same with activations of repeated layers on the host until they are needed."
        ),
    ] = False
    blocks: Annotated[
        "Sequence[str]",
        Option(
            flag="--block",
            help="What is gathered together where devices share states (repeatable): the class or "
            "the name of a module; default: each repeated layer.",
        ),
    ] = ()
    sync_devices: Annotated[
        "SyncDevices",
        Option(help="Number of devices to measure synchronisation over; 0: do not measure it."),
    ] = 2
    precision: Annotated[
        Precision | None,
        Option(
            help="With spec: devices, how products are computed: in tf32, or under autocast with "
            "float16 or bfloat16.",
            default="as torch does, convolutions in TF32 where the device has it",
        ),
    ] = None
    from_profile: Annotated[
        "Profile | Path | str | None",
        Option(help="With spec: devices, carry this measured profile of TARGET to them."),
    ] = None
    name: Annotated[str | None, Option(help="Name of the model in the profile.")] = None
    command: Annotated[str, Option(help="The user's command line, for the provenance.")] = ""
    progress: Annotated[
        "Callable[[str, float | None], None] | None",
        Option(help="Called with what is being measured, and the most seconds it may take."),
    ] = None


@dataclass(frozen=True, slots=True)
class ProfileCommandRequest(ProfileRequest):
    """What the command ``profile`` needs to know: it also corrects profiles by runs."""

    _: KW_ONLY
    quick: Annotated[bool, Option(help="Measure roughly, within a minute.")] = False
    thorough: Annotated[
        bool, Option(help="Measure until intervals are narrower; takes minutes.")
    ] = False
    from_run: Annotated[
        "Sequence[Path | str]",
        Option(
            help="Measure nothing: correct {profiles} by this run (repeatable); TARGET is left out."
        ),
    ] = ()
    profiles: Annotated[
        "Path | None", Option(help="With {from_run}: the folder of profiles to correct.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRequest:
    """What ``doctor`` needs to know."""

    report: Annotated[
        "Path | None",
        Option(metavar="FILE", help="Write versions, topology and findings here, to send."),
    ] = None
    suite: Annotated[
        "Path | None", Option(help="With {report}: results that `pytest --junitxml` has written.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest:
    """What ``demo`` needs to know."""

    output: Annotated[
        "Path | None", Option(other="-o", help="Keep profiles, plan and run in this new folder.")
    ] = None
    epochs: Annotated["Count", Option(help="Epochs of training.")] = 3
