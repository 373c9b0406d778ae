// Operators: every kernel is the CPU's. What differs on CUDA is done here: copies, refusals, counts.
#pragma once
#include "guard.hpp"

#include <ATen/Context.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace fakecuda {
using namespace at;

// As CUDA's TensorIterator: no operator takes tensors of two devices; of the host's, numbers alone.
// Returns a tensor on the device, if any.
inline Tensor check_devices(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::set<std::string> takes_host_indices = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"};
  const std::string& name = op.schema().name();
  Tensor host, device;
  auto look = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (!tensor.is_cuda()) {
      if (tensor.dim()) host = tensor;
      return;
    }
    TORCH_CHECK(
        !device.defined() || device.device() == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
        device.device(), " and ", tensor.device(), "! (", name, ")");
    device = tensor;
  };
  for (auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& tensor : value.toTensorVector()) look(tensor);
    else if (value.isOptionalTensorList())
      for (const auto& tensor : value.toOptionalTensorVector())
        if (tensor && tensor->is_cuda()) look(*tensor);
  }
  TORCH_CHECK(
      !host.defined() || !device.defined() || takes_host_indices.count(name) || takes_host_indices.count(name + "." + op.schema().overload_name()),
      "Expected all tensors to be on the same device, but found at least two devices, ", device.defined() ? device.device() : Device(kCUDA),
      " and cpu! (", name, ")");
  return device;
}

// Kernels that CUDA has in no deterministic form, as torch.use_deterministic_algorithms lists them.
inline void check_deterministic(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::map<std::string, const char*> refused = {
      {"aten::_adaptive_avg_pool2d_backward", "adaptive_avg_pool2d_backward_cuda"},
      {"aten::_adaptive_avg_pool3d_backward", "adaptive_avg_pool3d_backward_cuda"},
      {"aten::adaptive_max_pool2d_backward", "adaptive_max_pool2d_backward_cuda"},
      {"aten::avg_pool3d_backward", "avg_pool3d_backward_cuda"},
      {"aten::fractional_max_pool2d_backward", "fractional_max_pool2d_backward_cuda"},
      {"aten::fractional_max_pool3d_backward", "fractional_max_pool3d_backward_cuda"},
      {"aten::reflection_pad1d_backward", "reflection_pad1d_backward_out_cuda"},
      {"aten::reflection_pad3d_backward", "reflection_pad3d_backward_out_cuda"},
      {"aten::replication_pad1d_backward", "replication_pad1d_backward_cuda"},
      {"aten::replication_pad3d_backward", "replication_pad3d_backward_cuda"},
      {"aten::upsample_linear1d_backward", "upsample_linear1d_backward_out_cuda"},
      {"aten::upsample_bilinear2d_backward", "upsample_bilinear2d_backward_out_cuda"},
      {"aten::upsample_bicubic2d_backward", "upsample_bicubic2d_backward_out_cuda"},
      {"aten::upsample_trilinear3d_backward", "upsample_trilinear3d_backward_out_cuda"},
      {"aten::nll_loss2d_forward", "nll_loss2d_forward_out_cuda_template"},
      {"aten::nll_loss2d_backward", "nll_loss2d_backward_out_cuda_template"},
      {"aten::_ctc_loss_backward", "ctc_loss_backward_gpu"},
      {"aten::grid_sampler_2d_backward", "grid_sampler_2d_backward_cuda"},
      {"aten::grid_sampler_3d_backward", "grid_sampler_3d_backward_cuda"},
      {"aten::kthvalue", "kthvalue CUDA"},
      {"aten::histc", "_histc_cuda with floating point input"},
  };
  if (!globalContext().deterministicAlgorithms()) return;
  auto it = refused.find(op.schema().name());
  if (it != refused.end()) globalContext().alertNotDeterministic(it->second);
  const auto& arguments = torch::jit::last(*stack, op.schema().arguments().size());
  if (op.schema().name() == "aten::cumsum" && arguments[0].isTensor() && arguments[0].toTensor().is_floating_point())
    globalContext().alertNotDeterministic("cumsum_cuda_kernel");
  if (op.schema().name() == "aten::_embedding_bag_dense_backward" && arguments[7].toInt() == 2)
    globalContext().alertNotDeterministic("embedding_bag_backward_cuda_max");
}

// Random kernels draw from the device's generator, though they are the CPU's.
struct DeviceRandom {
  Generator host;
  Tensor before;
  int device = current_device;
  DeviceRandom() : host(at::detail::getDefaultCPUGenerator()), before(host.get_state()) { host.set_state(generator_of(device).get_state()); }
  ~DeviceRandom() {
    generator_of(device).set_state(host.get_state());
    host.set_state(before);
  }
};

// Operators run on their tensors' device, whichever is current.
struct OnDeviceOf {
  int before = current_device;
  explicit OnDeviceOf(const Tensor& tensor) {
    if (tensor.defined() && tensor.is_cuda()) current_device = tensor.get_device();
  }
  ~OnDeviceOf() { current_device = before; }
};

// An operator and its arguments as JSON: of a tensor its number in the call, type, sizes, strides.
inline std::string signature_of(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments, const std::vector<c10::IValue>& results) {
  const auto& schema = op.schema();
  std::string text = "[\"" + schema.name().substr(6) + "\",\"" + (schema.overload_name().empty() ? "default" : schema.overload_name()) + "\"";
  std::map<c10::TensorImpl*, int> numbers;
  auto listed = [&](const auto& values, auto&& one) {
    text += '[';
    bool is_first = true;
    for (const auto& value : values) {
      if (!is_first) text += ',';
      is_first = false;
      one(value);
    }
    text += ']';
  };
  auto number = [&](const auto& value) { text += std::to_string(value); };
  auto tensor = [&](const Tensor& value) {
    if (!value.defined()) {
      text += "null";
      return;
    }
    int own = numbers.emplace(value.unsafeGetTensorImpl(), (int)numbers.size()).first->second;
    text += "{\"n\":" + std::to_string(own) + ",\"t\":\"" + at::toString(value.scalar_type()) + "\",\"s\":";
    listed(value.sizes(), number);
    text += ",\"d\":";
    listed(value.strides(), number);
    text += '}';
  };
  std::function<void(const c10::IValue&)> any = [&](const c10::IValue& value) {
    if (value.isTensor()) tensor(value.toTensor());
    else if (value.isBool()) text += value.toBool() ? "true" : "false";
    else if (value.isInt()) text += std::to_string(value.toInt());
    else if (value.isList()) listed(value.toListRef(), any);
    else text += "null";
  };
  text += ',';
  listed(arguments, any);
  text += ',';
  listed(results, any);
  return text + ']';
}

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  OnDeviceOf guard(check_devices(op, stack));
  std::vector<c10::IValue> arguments;
  int64_t stream = stream_now();
  bool is_noted = !in_fallback && timeline_file();
  if (is_noted) {
    auto given = torch::jit::last(*stack, op.schema().arguments().size());
    arguments.assign(given.begin(), given.end());
  }
  if (!in_fallback) {
    check_deterministic(op, stack);
    settle(stream_now());
    Lock lock(mu);
    const auto& schema = op.schema();
    counts["kernel"]++;
    op_counts[schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name())]++;
    tick(stream_now());
    operation = schema.name().c_str();
  }
  struct Depth {
    Depth() { ++in_fallback; }
    ~Depth() { --in_fallback; }
  } depth;
  if (in_fallback == 1 && op.hasTag(at::Tag::nondeterministic_seeded)) {
    DeviceRandom random;
    at::native::cpu_fallback(op, stack);
  } else {
    at::native::cpu_fallback(op, stack);
  }
  if (is_noted) {
    auto made = torch::jit::last(*stack, op.schema().returns().size());
    Lock lock(mu);
    int number = number_of(signature_of(op, arguments, std::vector<c10::IValue>(made.begin(), made.end())));
    note("kernel\t%lld\t%d", (long long)stream, number);
  }
}

inline Tensor empty(
    c10::SymIntArrayRef size, std::optional<ScalarType> type, std::optional<Layout>, std::optional<Device> device, std::optional<bool>,
    std::optional<MemoryFormat> format) {
  ensure_initialised();
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      type.value_or(c10::get_default_dtype_as_scalartype()), format);
}
inline Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<ScalarType> type, std::optional<Layout>, std::optional<Device> device,
    std::optional<bool>) {
  ensure_initialised();
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      type.value_or(c10::get_default_dtype_as_scalartype()));
}

inline void copy_bytes(const Tensor& to, const Tensor& from) {
  Tensor source = from.is_cuda() ? host_alias(from) : from;
  if (from.is_neg()) source = source.neg();
  if (from.is_conj()) source = source.conj();
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  (to.is_cuda() ? host_alias(to) : to).copy_(source);
}

inline Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  OnDeviceOf guard(from.is_cuda() ? from : self);
  int64_t stream = stream_now();
  settle(stream);
  bool to_host = !self.is_cuda();
  // Between devices the copy runs on the source's stream, and both streams wait for each other.
  bool across = !to_host && from.is_cuda() && from.device() != self.device();
  int64_t there = across ? key_of(self.get_device(), current_stream(self.get_device())) : stream;
  if (across) settle(there);
  {
    Lock lock(mu);
    if (!in_fallback) {
      const char* kind = to_host ? "d2h" : from.is_cuda() ? "kernel" : "h2d";
      operation = to_host ? "copy_ to the host" : from.is_cuda() ? "copy_" : "copy_ from the host";
      counts[kind]++;
      op_counts[operation]++;
      tick(stream);
    }
    if (across) note("join\t%lld\t%lld", (long long)stream, (long long)there);
    merge(clocks[stream], clocks[there]);
    touch(from, false, stream);
    touch(self, true, stream);
    if (!in_fallback) note("copy\t%lld\t%s\t%zu", (long long)stream, to_host ? "d2h" : from.is_cuda() ? "kernel" : "h2d", self.nbytes());
    if (across) note("join\t%lld\t%lld", (long long)there, (long long)stream);
    merge(clocks[there], clocks[stream]);
  }
  if (to_host && !in_fallback) {
    // Pageable memory is staged: the host waits, whatever was asked for.
    if (!non_blocking || !is_pinned(self.data_ptr())) {
      host_waits_for(stream);
    } else {
      Tensor found = at::empty(self.sizes(), self.options().pinned_memory(false));
      copy_bytes(found, from);
      Tensor late = self.detach();
      memset(late.data_ptr(), 0xA5, late.is_contiguous() ? late.nbytes() : late.itemsize());
      Lock lock(mu);
      late_copies.push_back(
          {stream, clocks[stream][stream], late.storage().data(), [late, found] { late.copy_(found); }});
      return self;
    }
  }
  if (!to_host && !from.is_cuda()) {
    Lock lock(mu);
    land_copies(clocks[stream], from.storage().data());
  }
  // As c10::cuda::memcpy_and_sync: without ``non_blocking`` the host waits for its own copy too.
  if (!to_host && !from.is_cuda() && !non_blocking && !in_fallback) host_waits_for(stream);
  copy_bytes(self, from);
  return self;
}
inline Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  to.copy_(self, non_blocking);
  return to;
}
inline Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (self.sizes() != to.sizes()) to.resize_(self.sizes());
  to.copy_(self);
  return to;
}
inline Scalar item(const Tensor& self) {
  OnDeviceOf guard(self);
  int64_t stream = stream_now();
  settle(stream);
  {
    Lock lock(mu);
    operation = "item";
    touch(self, false, stream);
    if (!in_fallback) op_counts["item"]++;
  }
  if (!in_fallback) host_waits_for(stream);
  return at::_local_scalar_dense(host_alias(self));
}
inline const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  int64_t number = 1;
  for (auto length : sizes) number *= length;
  size_t needed = (number + self.storage_offset()) * self.itemsize();
  auto& storage = self.storage();
  if (storage.nbytes() < needed) {
    c10::DeviceGuard guard(self.device());
    auto data = device_memory.allocate(needed);
    if (storage.nbytes()) memcpy(data.get(), storage.data(), storage.nbytes());
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}
inline void record_stream(Tensor& tensor, Stream stream) {
  Lock lock(mu);
  if (Block* block = block_of(tensor.storage().mutable_data())) block->recorded.insert(Guard::key(stream));
}

// Attention is one kernel, as CUDA's memory-efficient one, where the CPU has one for it. Tensors may be without memory (torch.compile).
inline int64_t attention_kernel(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout, bool, std::optional<double>, bool) {
  auto fits = [&](const Tensor& t) {
    return t.dim() == 4 && t.sym_numel() > 0 && t.sym_stride(3) == 1 && t.sym_size(0) == query.sym_size(0) && t.sym_size(1) == query.sym_size(1) &&
           t.sym_size(3) == query.sym_size(3) && t.is_floating_point() && t.scalar_type() != kDouble;
  };
  bool is_one = globalContext().userEnabledMemEfficientSDP() && dropout == 0.0 && fits(query) && fits(key) && fits(value);
  is_one = is_one && (!mask || !mask->defined() || (!mask->requires_grad() && mask->scalar_type() == query.scalar_type()));
  return (int64_t)(is_one ? sdp::SDPBackend::efficient_attention : sdp::SDPBackend::math);
}
inline std::tuple<Tensor, Tensor, Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, bool, double dropout, bool is_causal,
    std::optional<double> scale) {
  auto [out, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, mask, scale);
  Tensor seed = at::empty({}, query.options().dtype(kLong));
  return {out, logsumexp, seed, seed};
}
inline std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask, const Tensor& out, const Tensor& logsumexp,
    const Tensor&, const Tensor&, double dropout, std::array<bool, 4>, bool is_causal, std::optional<double> scale) {
  auto given = mask.defined() ? std::optional<Tensor>(mask) : std::nullopt;
  auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(gradient, query, key, value, out, logsumexp, dropout, is_causal, given, scale);
  return {q, k, v, Tensor()};
}

// Cells of LSTMs and GRUs are one kernel on CUDA; the CPU has none of these, so it gets them here. The workspace is CUDA's: what goes back is made of it.
inline Tensor with_biases(Tensor gates, const std::optional<Tensor>& first, const std::optional<Tensor>& second) {
  if (first && first->defined()) gates = gates + *first;
  return second && second->defined() ? gates + *second : gates;
}
inline std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell, const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  auto gates = with_biases(input_gates + hidden_gates, input_bias, hidden_bias).chunk(4, 1);
  Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), made = gates[2].tanh(), out = gates[3].sigmoid();
  Tensor next = forget * cell + in * made;
  return {out * next.tanh(), next, at::cat({in, forget, made, out}, 1)};
}
inline std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const std::optional<Tensor>& of_hidden, const std::optional<Tensor>& of_next, const Tensor& cell, const Tensor& next, const Tensor& workspace,
    bool has_bias) {
  auto gates = workspace.chunk(4, 1);
  Tensor in = gates[0], forget = gates[1], made = gates[2], out = gates[3], bounded = next.tanh();
  Tensor hidden = of_hidden && of_hidden->defined() ? *of_hidden : at::zeros_like(next);
  Tensor back = hidden * out * (1 - bounded * bounded);
  if (of_next && of_next->defined()) back = back + *of_next;
  Tensor of_gates = at::cat(
      {back * made * in * (1 - in), back * cell * forget * (1 - forget), back * in * (1 - made * made), hidden * bounded * out * (1 - out)}, 1);
  return {of_gates, back * forget, has_bias ? of_gates.sum(0) : Tensor()};
}
inline std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden, const std::optional<Tensor>& input_bias,
    const std::optional<Tensor>& hidden_bias) {
  auto given = with_biases(input_gates, input_bias, std::nullopt).chunk(3, 1), held = with_biases(hidden_gates, hidden_bias, std::nullopt).chunk(3, 1);
  Tensor reset = (given[0] + held[0]).sigmoid(), update = (given[1] + held[1]).sigmoid(), made = (given[2] + reset * held[2]).tanh();
  return {made + update * (hidden - made), at::cat({reset, update, made, hidden, held[2]}, 1)};
}
inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& gradient, const Tensor& workspace, bool has_bias) {
  auto kept = workspace.chunk(5, 1);
  Tensor reset = kept[0], update = kept[1], made = kept[2], hidden = kept[3], held = kept[4];
  Tensor of_update = gradient * (hidden - made) * (1 - update) * update, of_made = gradient * (1 - update) * (1 - made * made);
  Tensor of_reset = of_made * held * (1 - reset) * reset;
  Tensor given = at::cat({of_reset, of_update, of_made}, 1), own = at::cat({of_reset, of_update, of_made * reset}, 1);
  return {given, own, gradient * update, has_bias ? given.sum(0) : Tensor(), has_bias ? own.sum(0) : Tensor()};
}

// Views touch no memory; each operator of aten's own, with plain numbers.
inline Tensor view(const Tensor& tensor, c10::SymIntArrayRef size) { return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size)); }
inline Tensor as_strided(const Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}
inline Tensor reshape_alias(const Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
inline Tensor& set_storage(Tensor& self, Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

}  // namespace fakecuda
