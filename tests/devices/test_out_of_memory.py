"""Messages that mean: memory has run out."""

import pytest

from hetflow.devices.backend import is_out_of_memory, says_out_of_memory


@pytest.mark.parametrize(
    "said",
    [
        "CUDA out of memory. Tried to allocate 20.00 MiB",
        "HIP out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "Unable to find a valid cuDNN algorithm to run convolution",
        "FIND was unable to find an engine to execute this computation",
        "GET was unable to find an engine to execute this computation",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "cusparse error: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
        "miopenStatusAllocFailed",
        "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory",
        "could not create a primitive",
        "std::bad_alloc",
    ],
)
def test_words_of_every_library(said: str) -> None:
    assert says_out_of_memory(said)
    assert is_out_of_memory(RuntimeError(said))
    assert not is_out_of_memory(KeyError(said))


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
        "CUDA error: device-side assert triggered",
        "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    ],
)
def test_other_errors(said: str) -> None:
    assert not says_out_of_memory(said)
