// Device memory: poisoned blocks of the host's, up to a limit, each with who last used it.
#pragma once
#include "clocks.hpp"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <set>
#include <sys/types.h>
#include <vector>

namespace fakecuda {

struct Use {
  int64_t stream = 0;
  uint64_t time = 0;
  std::string by;
  size_t begin = 0, end = 0;  // addresses
};
struct Block {
  size_t size;
  int device;
  int64_t owner;  // the stream it was allocated on
  std::vector<Use> written, read;  // the last of each byte; of reads, of each stream
  std::set<int64_t> recorded;
};
inline auto& blocks = *new std::map<void*, Block>;
inline auto& pinned = *new std::map<void*, size_t>;
inline auto& used = *new std::map<int, size_t>;
inline auto& peak = *new std::map<int, size_t>;

// What no tensor holds: a context a process, and buffers a communicator of the current device.
inline size_t context_bytes = 0, communicator_bytes = 0;
inline auto& communicators = *new std::map<int, size_t>;
inline size_t beside_tensors(int device) { return context_bytes + communicators[device] * communicator_bytes; }

// The host's devices. Python reads the environment when CUDA is first used: see cuda.py.
inline std::vector<size_t> capacities;
inline pid_t initialised_in = 0;
inline pybind11::object& initialise = *new pybind11::object;  // at the first use
inline pybind11::object& count_devices = *new pybind11::object;  // before that

inline void ensure_initialised() {
  if (initialised_in == getpid()) return;
  pybind11::gil_scoped_acquire gil;
  initialise();
}
inline int num_devices() {
  if (initialised_in == getpid()) return capacities.size();
  pybind11::gil_scoped_acquire gil;
  return count_devices().cast<int>();
}
inline void set_device(int index) {
  ensure_initialised();
  TORCH_CHECK(index >= 0 && index < (int)capacities.size(), "CUDA error: invalid device ordinal");
  current_device = index;
}

inline Block* block_of(const void* address) {
  auto it = blocks.upper_bound(const_cast<void*>(address));
  if (it == blocks.begin()) return nullptr;
  --it;
  bool inside = (char*)address < (char*)it->first + std::max<size_t>(it->second.size, 1);
  return inside ? &it->second : nullptr;
}
inline bool is_pinned(const void* address) {
  Lock lock(mu);
  auto it = pinned.upper_bound(const_cast<void*>(address));
  if (it == pinned.begin()) return false;
  --it;
  return (char*)address < (char*)it->first + it->second;
}

inline std::string on(const Use& use) { return "stream " + std::to_string(use.stream) + " by " + use.by; }

// The addresses from a tensor's first value to its last.
inline std::pair<size_t, size_t> bytes_of(const at::Tensor& tensor) {
  size_t begin = (size_t)tensor.const_data_ptr(), last = 0;
  for (int64_t n = 0; n < tensor.dim(); n++) last += (tensor.size(n) - 1) * tensor.stride(n);
  return {begin, begin + (last + 1) * tensor.itemsize()};
}

// A use covers the bytes of earlier ones that are not met by it otherwise.
inline void cover(std::vector<Use>& uses, const Use& own, bool of_all_streams) {
  std::vector<Use> kept;
  for (auto& use : uses) {
    if (use.end <= own.begin || own.end <= use.begin || !(of_all_streams || use.stream == own.stream)) {
      kept.push_back(use);
      continue;
    }
    Use before = use, after = use;
    before.end = own.begin;
    after.begin = own.end;
    if (before.begin < before.end) kept.push_back(before);
    if (after.begin < after.end) kept.push_back(after);
  }
  uses.swap(kept);
}

// A stream reads or writes a tensor: has it waited for those who used it before?
inline void touch(const at::Tensor& tensor, bool writes, int64_t stream) {
  if (!tensor.defined() || !tensor.is_cuda() || !tensor.numel()) return;
  Block* block = block_of(tensor.storage().data());
  if (!block) return;
  Clock& clock = clocks[stream];
  auto [begin, end] = bytes_of(tensor);
  Use own{stream, clock[stream], operation, begin, end};
  auto raced = [&](const Use& use) { return use.begin < end && begin < use.end && use.stream != stream && clock[use.stream] < use.time; };
  for (auto& use : block->written)
    if (raced(use)) complain("race", std::string(writes ? "write" : "read") + " on " + on(own) + " does not wait for the write on " + on(use));
  if (writes) {
    for (auto& use : block->read)
      if (raced(use)) complain("race", "write on " + on(own) + " does not wait for the read on " + on(use));
    cover(block->read, own, true);
    cover(block->written, own, true);
    block->written.push_back(own);
  } else {
    cover(block->read, own, false);
    block->read.push_back(own);
  }
}

inline void free_device(void* address) {
  {
    Lock lock(mu);
    auto it = blocks.find(address);
    if (it != blocks.end()) {
      Block& block = it->second;
      // The allocator waits for where recorded streams are now, and so for what they have waited for.
      auto pending = [&](const Use& use) {
        if (use.stream == block.owner || clocks[block.owner][use.stream] >= use.time || clocks[kHost][use.stream] >= use.time) return false;
        return std::none_of(block.recorded.begin(), block.recorded.end(), [&](int64_t stream) {
          return stream == use.stream || clocks[stream][use.stream] >= use.time;
        });
      };
      auto judge = [&](const Use& use, const char* what) {
        if (pending(use))
          complain("race", "freed to stream " + std::to_string(block.owner) + " while it may still be " + what + " on " + on(use) + ", without record_stream");
      };
      for (auto& use : block.written) judge(use, "written");
      for (auto& use : block.read) judge(use, "read");
      used[block.device] -= block.size;
      blocks.erase(it);
    }
  }
  std::free(address);
}

inline std::string mebibytes(size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f MiB", bytes / 1048576.0);
  return text;
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t asked) override {
    ensure_initialised();
    Lock lock(mu);
    int device = current_device;
    size_t size = (asked + 511) / 512 * 512, all = capacities.at(device);
    all -= std::min(all, beside_tensors(device));
    if (used[device] + size > all)
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", mebibytes(asked), ". GPU ", device,
          " has a total capacity of ", mebibytes(all), " of which ", mebibytes(all - used[device]), " is free.");
    void* address = std::aligned_alloc(512, std::max<size_t>(size, 512));
    memset(address, 0xA5, std::max<size_t>(size, 512));
    blocks[address] = Block{size, device, stream_now(), {}, {}, {}};
    used[device] += size;
    peak[device] = std::max(peak[device], used[device]);
    return {address, address, &free_device, at::Device(at::kCUDA, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
inline DeviceMemory device_memory;

inline void free_pinned(void* address) {
  {
    Lock lock(mu);
    pinned.erase(address);
  }
  std::free(address);
}
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* address = std::aligned_alloc(512, std::max<size_t>((size + 511) / 512 * 512, 512));
    Lock lock(mu);
    pinned[address] = std::max<size_t>(size, 1);
    return {address, address, &free_pinned, at::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
inline PinnedMemory pinned_memory;

// The same memory as a tensor of the host's.
inline at::Tensor host_alias(const at::Tensor& tensor) {
  static int nothing = 0;
  at::Tensor keep = tensor;
  void* data = tensor.numel() ? tensor.data_ptr() : &nothing;
  return at::from_blob(
      data, tensor.sizes(), tensor.strides(), [keep](void*) {}, tensor.options().device(at::kCPU).requires_grad(false));
}

}  // namespace fakecuda
