// What torch asks a device for: current device and stream, events, and the hooks of CUDA.
#pragma once
#include "memory.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

namespace fakecuda {

inline double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
struct Mark {  // an event
  Clock clock;
  Works works;
  double seconds = 0;
  uint64_t number = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  using DeviceIndex = c10::DeviceIndex;
  static Stream stream_of(int device, int64_t id) { return Stream(Stream::UNSAFE, Device(at::kCUDA, device), id); }
  static int index_of(Device device) { return device.index() < 0 ? current_device : device.index(); }
  static int64_t key(const Stream& stream) { return key_of(stream.device_index(), stream.id()); }

  c10::DeviceType type() const override { return at::kCUDA; }
  Device getDevice() const override { return Device(at::kCUDA, current_device); }
  Device exchangeDevice(Device device) const override {
    Device old = getDevice();
    setDevice(device);
    return old;
  }
  void setDevice(Device device) const override {
    if (device.index() >= 0 && device.index() != current_device) set_device(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < (int)capacities.size()) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return num_devices(); }

  Stream getStream(Device device) const override { return stream_of(index_of(device), current_stream(index_of(device))); }
  Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  Stream getNewStream(Device device, int) const override {
    Lock lock(mu);
    return stream_of(index_of(device), next_stream++);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    Stream old = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return old;
  }
  bool queryStream(const Stream& stream) const override {
    Lock lock(mu);
    for (auto& work : awaited[key(stream)])
      if (!work->isCompleted()) return false;
    return true;
  }
  void synchronizeStream(const Stream& stream) const override { host_waits_for(key(stream)); }
  void synchronizeDevice(const DeviceIndex device) const override {
    std::vector<int64_t> streams;
    {
      Lock lock(mu);
      for (auto& [stream, _] : clocks)
        if (stream >= 0 && device_of(stream) == device) streams.push_back(stream);
      counts["host_sync"]++;
    }
    for (int64_t stream : streams) {
      settle(stream);
      Lock lock(mu);
      note("host\t-%lld", (long long)stream);
      host_has_waited(clocks[stream]);
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    Lock lock(mu);
    if (Block* block = block_of(data.get())) block->recorded.insert(key(stream));
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mu);
    if (!*event) *event = new Mark;
    auto* mark = (Mark*)*event;
    tick(key(stream));
    mark->clock = clocks[key(stream)];
    mark->works = awaited[key(stream)];
    mark->seconds = now_seconds();
    mark->number = new_event();
    note("record\t%lld\t%llu", (long long)key(stream), (unsigned long long)mark->number);
    counts["event_record"]++;
  }
  void block(void* event, const Stream& stream) const override {
    Lock lock(mu);
    counts["stream_wait"]++;
    if (!event) return;
    auto* mark = (Mark*)event;
    note("wait\t%lld\t%llu", (long long)key(stream), (unsigned long long)mark->number);
    merge(clocks[key(stream)], mark->clock);
    Works& works = awaited[key(stream)];
    works.insert(works.end(), mark->works.begin(), mark->works.end());
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto* mark = (Mark*)event;
    for (auto& work : mark->works)
      if (!work->isCompleted()) return false;
    land(mark->works);
    Lock lock(mu);
    host_has_waited(mark->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) land(((Mark*)event)->works);
    Lock lock(mu);
    counts["host_sync"]++;
    if (event) note("host\t%llu", (unsigned long long)((Mark*)event)->number);
    if (event) host_has_waited(((Mark*)event)->clock);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete (Mark*)event; }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    return (((Mark*)end)->seconds - ((Mark*)start)->seconds) * 1e3;
  }
};

// Random numbers of each device come from a generator of its own.
inline at::Generator& generator_of(int device) {
  static std::map<int, at::Generator> made;
  auto it = made.find(device);
  if (it == made.end()) it = made.emplace(device, at::detail::createCPUGenerator(0)).first;
  return it->second;
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override { ensure_initialised(); }
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return initialised_in == getpid(); }
  int getNumGPUs() const override { return num_devices(); }
  c10::DeviceIndex deviceCount() const override { return num_devices(); }
  c10::DeviceIndex current_device() const override { return fakecuda::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return fakecuda::current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto old = fakecuda::current_device;
    set_device(device);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  at::Device getDeviceFromPtr(void* data) const override {
    Lock lock(mu);
    Block* block = block_of(data);
    return block ? at::Device(at::kCUDA, block->device) : at::Device(at::kCPU);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return generator_of(device < 0 ? fakecuda::current_device : device);
  }
};

}  // namespace fakecuda
