// A CUDA device in software, under CUDA's own dispatch key in a CPU build of torch. docs/gpus.md says
// what it models.
#include "gloo.hpp"

#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace fakecuda {
REGISTER_ALLOCATOR(kCUDA, &device_memory);
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}  // namespace fakecuda

namespace at {
using FakeHooks = ::fakecuda::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeHooks)
}  // namespace at

namespace c10d {
// DistributedDataParallel needs one; it only fills its statistics.
struct SoftwareTimer final : Timer {
  explicit SoftwareTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, SoftwareTimer);
}  // namespace c10d

namespace fakecuda {
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", fakecuda::empty);
  m.impl("empty_strided", fakecuda::empty_strided);
  m.impl("copy_", fakecuda::copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", fakecuda::item);
  m.impl("resize_", fakecuda::resize_);
  m.impl("record_stream", fakecuda::record_stream);
  m.impl("view", fakecuda::view);
  m.impl("as_strided", fakecuda::as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view.dtype", &at::native::view_dtype);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_scaled_dot_product_efficient_attention", attention);
  m.impl("_scaled_dot_product_efficient_attention_backward", attention_backward);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_kernel);
  // One kernel, as on CUDA, where torch's own form would take several.
  for (const char* name : {"convolution", "convolution_backward", "native_layer_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  // One kernel for a list of tensors, as on CUDA; torch's own form loops over them.
  for (const char* name :
       {"_foreach_add_.List", "_foreach_add_.Scalar", "_foreach_add.List", "_foreach_mul_.Scalar", "_foreach_mul_.Tensor", "_foreach_mul_.List",
        "_foreach_norm.Scalar", "_foreach_addcmul_.Scalar", "_foreach_addcdiv_.ScalarList", "_foreach_lerp_.Scalar", "_foreach_sqrt",
        "_foreach_div_.ScalarList", "_foreach_zero_", "_foreach_copy_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}
}  // namespace fakecuda

PYBIND11_MODULE(_fakecuda, m) {
  using namespace fakecuda;
  py::module_::import("torch.distributed");
  m.def("ask", [](py::object first_use, py::object count) {
    initialise = std::move(first_use);
    count_devices = std::move(count);
  });
  m.def("configure", [](std::vector<size_t> sizes) {
    capacities = std::move(sizes);
    initialised_in = getpid();
  });
  m.def("initialised_in", [] { return (int64_t)initialised_in; });
  m.def("counts", [] {
    Lock lock(mu);
    return counts;
  });
  m.def("op_counts", [] {
    Lock lock(mu);
    return op_counts;
  });
  m.def("reset_counts", [] {
    Lock lock(mu);
    counts.clear();
    op_counts.clear();
  });
  m.def("used", [](int device) {
    Lock lock(mu);
    return used[device];
  });
  m.def("peak", [](int device) {
    Lock lock(mu);
    return peak[device];
  });
  m.def("set_beside_tensors", [](size_t context, size_t communicator) {
    context_bytes = context;
    communicator_bytes = communicator;
  });
  m.def("beside_tensors", [](int device) {
    Lock lock(mu);
    return beside_tensors(device);
  });
  m.def("reset_peak", [](int device) {
    Lock lock(mu);
    peak[device] = used[device];
  });
  m.def("synchronize", [](int device) { Guard().synchronizeDevice(device); }, py::call_guard<py::gil_scoped_release>());
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int device) { set_device(device); });
  m.def("get_stream", [](int device) { return current_stream(device); });
  m.def("set_stream", [](int device, int64_t id) { current_streams[device] = id; });
  m.def("note", [](const std::string& line) {
    Lock lock(mu);
    note("%s", line.c_str());
  });
  m.def("resize_storage", [](const at::Tensor& tensor, size_t size) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto made = device_memory.allocate(size);
    auto kept = std::min(size, storage->nbytes());
    if (kept) std::memcpy(made.get(), storage->data(), kept);
    storage->set_data_ptr_noswap(std::move(made));
    storage->set_nbytes(size);
  });
  m.def("mark", [](const std::string& name) {
    Lock lock(mu);
    note("mark\t%lld\t%s", (long long)stream_now(), name.c_str());
  });
  m.def("seed", [](int device, uint64_t seed) {
    auto& generator = generator_of(device);
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(seed);
  });
  m.def("get_random_state", [](int device) { return generator_of(device).get_state(); });
  m.def("set_random_state", [](int device, const at::Tensor& state) { generator_of(device).set_state(state); });
  py::class_<FakeNCCL, c10d::Backend, c10::intrusive_ptr<FakeNCCL>>(m, "FakeNCCL")
      .def(py::init<int, int, c10::intrusive_ptr<c10d::Backend>, std::string>())
      .def("_group_start", [](FakeNCCL&) {})
      .def("_group_end", [](FakeNCCL&) {});
  py::class_<StagedGloo, c10d::Backend, c10::intrusive_ptr<StagedGloo>>(m, "StagedGloo")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>());
}
