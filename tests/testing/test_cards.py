"""Which cards a process sees, by its environment."""

from pathlib import Path

import pytest

from hetflow.planning.costs.device_table import spec_of
from hetflow.schema.cluster import device_type_name
from hetflow.testing.fakecuda.build import CannotBuild, check_build
from hetflow.testing.fakecuda.cards import CARDS, GIB, machine, visible

THREE = {"FAKECUDA": "V100,V100:64MiB,A100"}


def buses(**environment: str) -> list[int]:
    return [card.pci_bus_id for card in visible({**THREE, **environment})]


@pytest.mark.parametrize(
    ("said", "seen"),
    [("", []), ("2,0", [3, 1]), ("0,7,1", [1]), ("GPU-host-2", [2]), ("GPU-host", []), ("-1", [])],
)
def test_visible_devices_as_cuda_reads_them(said: str, seen: list[int]) -> None:
    assert buses(CUDA_VISIBLE_DEVICES=said) == seen


def test_rocm_filters_twice_and_puts_its_own_variable_first() -> None:
    both = {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert buses(**both) == [1]
    assert buses(**both, FAKECUDA_PLATFORM="rocm") == [2]
    assert buses(**both, FAKECUDA_PLATFORM="rocm", ROCR_VISIBLE_DEVICES="1,2") == [3]


def test_slices_share_a_bus_and_the_memory() -> None:
    cards = machine({"FAKECUDA": "A100/2,V100", "FAKECUDA_HOST": "a"})
    assert [card.pci_bus_id for card in cards] == [1, 1, 2]
    assert [card.uuid for card in cards] == ["MIG-a-1-0", "MIG-a-1-1", "GPU-a-2-0"]
    assert [card.memory_bytes for card in cards] == [20 * GIB, 20 * GIB, 16 * GIB]
    assert len(visible({"FAKECUDA": "A100/2"})) == 2


def test_an_unknown_card_is_named() -> None:
    with pytest.raises(ValueError, match="'B1000' is no card"):
        machine({"FAKECUDA": "V100,B1000"})


def test_a_torch_with_kernels_for_gpus_is_refused(tmp_path: Path) -> None:
    check_build(tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libtorch_cuda.so").touch()
    with pytest.raises(CannotBuild, match="needs a CPU build of torch"):
        check_build(tmp_path)


def test_every_card_has_the_row_of_its_type_in_the_table_of_devices() -> None:
    for card in CARDS.values():
        spec = spec_of(card.spec)
        assert spec.device_type == device_type_name(card.name)
        assert spec.memory_bytes == card.memory_bytes
