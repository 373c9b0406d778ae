"""Peak figures of devices, from their makers' data sheets.

Rates are peaks without sparsity, of one device as torch counts devices. Training does not reach
them: ``roofline`` multiplies them by efficiencies that were fitted to measured runs.

Most figures were compared with public tables of the sheets. Written from memory were the rates of
A10G and GH200, the 16-bit rate of the 6000 Ada, and most links. So was the power of boards that
Lambda's tables have not. Read the data sheet before you spend money by them.

The 16-bit rates of Quadro RTX cards are eight times their 32-bit rates, that of the RTX 2080 Ti
four times. The sheet of the passive Quadro RTX 6000 has it so.
"""

from dataclasses import dataclass

from ...schema.errors import ProblemError
from ...schema.spelling import did_you_mean

_GIB = 2**30
_TERA = 1e12
_GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One row: a form of a device type.

    Args:
        name: Of the form, such as ``A100-SXM4-40GB``.
        device_type: As hetflow names such a device where it finds one (``A100``).
        memory_bytes: Of one device.
        float32_flops_per_second: Of the vector units.
        tf32_flops_per_second: Of 32-bit products on matrix units; None where there are none.
        half_flops_per_second: Of 16-bit products with 32-bit sums, on matrix units where the
            device has them; None where 16 bits are no faster than 32.
        has_bfloat16: Whether that rate holds for bfloat16 too; else it is emulated.
        memory_bytes_per_second: Of the device's own memory.
        board_watts: What the board may draw; of a board with two devices, half.
        link: What joins two devices of a host.
        link_bytes_per_second: Of that link, one way.
        source: Where the figures are from.
    """

    name: str
    device_type: str
    memory_bytes: int
    float32_flops_per_second: float
    tf32_flops_per_second: float | None
    half_flops_per_second: float | None
    has_bfloat16: bool
    memory_bytes_per_second: float
    board_watts: float
    link: str
    link_bytes_per_second: float
    source: str

    @property
    def host_bytes_per_second(self) -> float:
        """Of the link to the host, one way: PCIe, of the generation that comes with ``link``."""
        known = (rate for link, rate in _HOST_LINKS.items() if self.link.startswith(link))
        return next(known, self.link_bytes_per_second)


_HOST_LINKS = {
    "NVLink 1": 16e9, "NVLink 2": 16e9, "NVLink 3": 32e9, "NVLink 4": 64e9, "NVLink 5": 64e9,
    "Infinity Fabric": 32e9,
}  # fmt: skip
"""PCIe 3, 4 or 5 x16, by the link between devices; a GH200's own link to its host is faster."""


def _row(
    device_type: str,
    name: str,
    gib: float,
    float32: float,
    tf32: float | None,
    half: float | None,
    memory: float,
    watts: float,
    link: str,
    both_ways: float,
    source: str,
    *,
    bfloat16: bool = True,
) -> DeviceSpec:
    """A row in the sheets' units: GiB, TFLOP/s, GB/s, W, and a link's two directions together."""
    return DeviceSpec(
        name=name,
        device_type=device_type,
        memory_bytes=int(gib * _GIB),
        float32_flops_per_second=float32 * _TERA,
        tf32_flops_per_second=None if tf32 is None else tf32 * _TERA,
        half_flops_per_second=None if half is None else half * _TERA,
        has_bfloat16=bfloat16,
        memory_bytes_per_second=memory * _GIGA,
        board_watts=watts,
        link=link,
        link_bytes_per_second=both_ways * _GIGA / 2,
        source=source,
    )


# fmt: off
SPECS: tuple[DeviceSpec, ...] = (
    _row("K80", "K80", 12, 2.8, None, None, 240, 150, "PCIe 3 x16", 32,
         "NVIDIA K80 board specification, one of its two dies, without boost", bfloat16=False),
    _row("P100", "P100-SXM2-16GB", 16, 10.6, None, 21.2, 732, 300, "NVLink 1", 160,
         "NVIDIA P100 data sheet", bfloat16=False),
    _row("P100", "P100-PCIE-16GB", 16, 9.3, None, 18.7, 732, 250, "PCIe 3 x16", 32,
         "NVIDIA P100 data sheet", bfloat16=False),
    _row("P40", "P40-24GB", 24, 12, None, None, 346, 250, "PCIe 3 x16", 32,
         "NVIDIA P40 data sheet", bfloat16=False),
    _row("V100", "V100-SXM2-16GB", 16, 15.7, None, 125, 900, 300, "NVLink 2", 300,
         "NVIDIA V100 data sheet", bfloat16=False),
    _row("V100", "V100-SXM2-32GB", 32, 15.7, None, 125, 900, 300, "NVLink 2", 300,
         "NVIDIA V100 data sheet", bfloat16=False),
    _row("V100", "V100-PCIE-16GB", 16, 14, None, 112, 900, 250, "PCIe 3 x16", 32,
         "NVIDIA V100 data sheet", bfloat16=False),
    _row("V100S", "V100S-PCIE-32GB", 32, 16.4, None, 130, 1134, 250, "PCIe 3 x16", 32,
         "NVIDIA V100 data sheet, V100S", bfloat16=False),
    _row("TITANRTX", "TITAN-RTX-24GB", 24, 16.3, None, 130, 672, 280, "PCIe 3 x16", 32,
         "NVIDIA Turing white paper, TITAN RTX", bfloat16=False),
    _row("T4", "T4-16GB", 16, 8.1, None, 65, 320, 70, "PCIe 3 x16", 32,
         "NVIDIA T4 data sheet", bfloat16=False),
    _row("A10G", "A10G-24GB", 24, 35, 35, 70, 600, 300, "PCIe 4 x16", 64,
         "NVIDIA A10G data sheet for AWS G5"),
    _row("A10", "A10-24GB", 24, 31.2, 62.5, 125, 600, 150, "PCIe 4 x16", 64,
         "NVIDIA A10 data sheet"),
    _row("L4", "L4-24GB", 24, 30.3, 60, 121, 300, 72, "PCIe 4 x16", 64,
         "NVIDIA L4 data sheet, figures with sparsity halved"),
    _row("L40S", "L40S-48GB", 48, 91.6, 183, 362, 864, 350, "PCIe 4 x16", 64,
         "NVIDIA L40S data sheet"),
    _row("A40", "A40-48GB", 48, 37.4, 74.8, 149.7, 696, 300, "PCIe 4 x16", 64,
         "NVIDIA A40 data sheet"),
    _row("RTXA6000", "RTX-A6000-48GB", 48, 38.7, 77.4, 154.8, 768, 300, "PCIe 4 x16", 64,
         "NVIDIA RTX A6000 data sheet, figures with sparsity halved"),
    _row("RTX6000Ada", "RTX6000Ada-48GB", 48, 91.1, 182.1, 364.2, 960, 300, "PCIe 4 x16", 64,
         "NVIDIA RTX 6000 Ada data sheet, figures with sparsity halved"),
    _row("A100", "A100-SXM4-40GB", 40, 19.5, 156, 312, 1555, 400, "NVLink 3", 600,
         "NVIDIA A100 data sheet"),
    _row("A100", "A100-SXM4-80GB", 80, 19.5, 156, 312, 2039, 400, "NVLink 3", 600,
         "NVIDIA A100 data sheet"),
    _row("A100", "A100-PCIE-40GB", 40, 19.5, 156, 312, 1555, 250, "PCIe 4 x16", 64,
         "NVIDIA A100 data sheet, without a bridge"),
    _row("A100", "A100-PCIE-80GB", 80, 19.5, 156, 312, 1935, 300, "PCIe 4 x16", 64,
         "NVIDIA A100 data sheet, without a bridge"),
    _row("A800", "A800-SXM4-80GB", 80, 19.5, 156, 312, 2039, 400, "NVLink 3", 400,
         "NVIDIA A800 data sheet: an A100's, but for NVLink"),
    _row("H100", "H100-SXM5-80GB", 80, 67, 494.7, 989.4, 3350, 700, "NVLink 4", 900,
         "NVIDIA H100 data sheet, figures with sparsity halved"),
    _row("H100PCIe", "H100-PCIE-80GB", 80, 51, 378, 756, 2000, 350, "NVLink 4 bridge", 600,
         "NVIDIA H100 data sheet, figures with sparsity halved"),
    _row("H200", "H200-SXM5-141GB", 131, 67, 494.7, 989.4, 4800, 700, "NVLink 4", 900,
         "NVIDIA H200 data sheet, figures with sparsity halved; 141e9 bytes"),
    _row("B200", "B200-SXM6-180GB", 167, 75, 1100, 2250, 7700, 1000, "NVLink 5", 1800,
         "NVIDIA HGX B200 data sheet, an eighth, figures with sparsity halved; 180e9 bytes"),
    _row("GH200", "GH200-96GB", 89, 67, 494.7, 989.4, 4000, 700, "NVLink 4", 900,
         "NVIDIA GH200 data sheet, figures with sparsity halved; 96e9 bytes"),
    _row("MI210", "MI210-64GB", 64, 22.6, None, 181, 1638, 300, "PCIe 4 x16", 64,
         "AMD MI210 data sheet"),
    _row("MI250X", "MI250X-64GB", 64, 23.9, None, 191.5, 1638, 280, "Infinity Fabric", 100,
         "AMD MI250X data sheet, one of its two dies"),
    _row("MI300X", "MI300X-192GB", 192, 163.4, 653.7, 1307.4, 5300, 750, "Infinity Fabric", 896,
         "AMD MI300X data sheet"),
    _row("RTX6000", "QuadroRTX6000-24GB", 24, 16.3, None, 130.5, 672, 260, "PCIe 3 x16", 32,
         "NVIDIA Quadro RTX 6000 data sheet", bfloat16=False),
    _row("RTX8000", "QuadroRTX8000-48GB", 48, 16.3, None, 130.5, 672, 260, "PCIe 3 x16", 32,
         "NVIDIA Quadro RTX 8000 data sheet", bfloat16=False),
    _row("RTX2080Ti", "RTX-2080-Ti-11GB", 11, 13.4, None, 53.8, 616, 250, "PCIe 3 x16", 32,
         "NVIDIA Turing white paper, reference clocks, 32-bit sums", bfloat16=False),
    _row("RTX3090", "RTX-3090-24GB", 24, 35.6, 35.6, 71, 936, 350, "PCIe 4 x16", 64,
         "NVIDIA GA102 white paper, 32-bit sums"),
    _row("RTX3060", "RTX-3060-12GB", 12, 12.7, 12.7, 25.4, 360, 170, "PCIe 4 x16", 64,
         "NVIDIA's page of the RTX 3060, rates of a core and clock as in the GA102 white paper"),
    _row("RTX4090", "RTX-4090-24GB", 24, 82.6, 82.6, 165.2, 1008, 450, "PCIe 4 x16", 64,
         "NVIDIA Ada white paper, 32-bit sums"),
    _row("RTX5090", "RTX-5090-32GB", 32, 104.8, 104.8, 209.5, 1792, 575, "PCIe 5 x16", 128,
         "NVIDIA RTX Blackwell white paper, 32-bit sums"),
)
# fmt: on


def spec_of(name: str) -> DeviceSpec:
    """The row of that name; of a device type alone, its first (the least memory).

    Raises:
        ProblemError: There is no such row; names the nearest.
    """
    for spec in SPECS:
        if name.lower() in (spec.name.lower(), spec.device_type.lower()):
            return spec
    known = [known for spec in SPECS for known in (spec.device_type, spec.name)]
    types = ", ".join(dict.fromkeys(spec.device_type for spec in SPECS))
    raise ProblemError(
        f"spec:{name}: the device table has no such device"
        + did_you_mean(name, known, before="; "),
        hint=f"it has {types}, and their forms, such as A100-SXM4-80GB",
    )
