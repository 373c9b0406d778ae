// NCCL over gloo: device tensors alone, on the device of the communicator; the stream waits, not
// the host; and a peer that is gone, or late, ends the process through the watchdog.
#pragma once
#include "operators.hpp"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <thread>

namespace fakecuda {
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<Tensor>;

[[noreturn]] inline void watchdog(int rank, const std::string& operation, const std::string& error) {
  const char* text = std::getenv("FAKECUDA_WATCHDOG_SECONDS");
  bool late = error.find("imed out") != std::string::npos || error.find("imeout") != std::string::npos;
  std::this_thread::sleep_for(std::chrono::duration<double>(text ? std::atof(text) : 1.0));
  std::string said = late ? "Watchdog caught collective operation timeout: " + operation
                          : "NCCL error: remote process exited or there was a network error (" + operation + ")";
  std::fprintf(stderr, "[rank%d]: %s\n[rank%d]: To avoid data inconsistency, we are taking the entire process down.\n", rank, said.c_str(), rank);
  std::fflush(stderr);
  std::abort();
}

// As TORCH_NCCL_ASYNC_ERROR_HANDLING=0: without a watchdog, a lost collective holds its stream until
// the communicator is aborted. Its result is then garbage.
inline bool has_watchdog() {
  const char* text = std::getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING");
  return !text || std::string(text) != "0";
}

struct StrictWork final : c10d::Work {
  WorkPtr inner;
  std::string what;
  int rank = 0, device = 0;
  int64_t stream = 0;
  std::shared_ptr<std::atomic<bool>> aborted;
  std::vector<std::pair<Tensor, Tensor>> results;  // where on the device, and what gloo made on the host
  Tensors keep;
  Clock done;
  uint64_t number = 0;  // of the event that is its end
  std::mutex landing;
  std::atomic<bool> landed = false;

  bool guarded = true;  // by the watchdog

  void hang(const std::string& error) {
    for (int waited = 0; !*aborted; waited++) {
      if (waited > 30000) watchdog(rank, what, error);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  // The result is there. Runs without the GIL.
  void synchronize() override {
    std::lock_guard<std::mutex> lock(landing);
    if (landed) return;
    try {
      if (inner) inner->wait();
    } catch (const std::exception& error) {
      if (!guarded && !*aborted) hang(error.what());
      if (!guarded) {
        for (auto& [device, host] : results) memset(host_alias(device).mutable_data_ptr(), 0xFF, device.nbytes());
        landed = true;
        results.clear();
        keep.clear();
        return;
      }
      if (!*aborted) watchdog(rank, what, error.what());
      landed = true;
      throw;
    }
    for (auto& [device, host] : results) host_alias(device).copy_(host);
    landed = true;
    results.clear();
    keep.clear();
  }
  bool isCompleted() override {
    if (landed || !inner) return true;
    return inner->isCompleted() && (guarded || *aborted || inner->isSuccess());
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    Lock lock(mu);
    merge(clocks[stream_now()], done);
    awaited[stream_now()].push_back(c10::intrusive_ptr<c10d::Work>::reclaim_copy(this));
    note("wait\t%lld\t%llu", (long long)stream_now(), (unsigned long long)number);
    counts["nccl_wait"]++;
    return true;
  }
  // Complete at once, as NCCL's: whoever waits for it makes a stream wait.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    Tensors found;
    for (auto& [device, _] : results) found.push_back(device);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{Device(kCUDA, device)});
    Guard guard;
    auto before = guard.exchangeStream(Guard::stream_of(device, stream));
    {
      Lock lock(mu);
      awaited[key_of(device, stream)].push_back(c10::intrusive_ptr<c10d::Work>::reclaim_copy(this));
    }
    future->markCompleted(c10::IValue(found));
    {
      Lock lock(mu);
      awaited[key_of(device, stream)].clear();
    }
    guard.exchangeStream(before);
    return future;
  }
  std::vector<Tensor> result() override {
    Tensors found;
    for (auto& [device, _] : results) found.push_back(device);
    return found;
  }
  ~StrictWork() override {
    try {
      if (!landed && !*aborted) synchronize();
    } catch (...) {
    }
  }
};

struct FakeNCCL final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  const int64_t stream;
  const std::string name;  // the same in all its processes, and no other group's
  std::map<int, int64_t> pairs;  // messages have a communicator and a stream a peer, as torch's NCCL
  std::map<std::pair<int, bool>, uint64_t> numbers;  // how many so far: by peer and whether sent
  int device = -1;
  const bool guarded = has_watchdog();
  bool is_connected = false;  // at the first collective, as NCCL
  std::shared_ptr<std::atomic<bool>> aborted = std::make_shared<std::atomic<bool>>(false);

  FakeNCCL(int rank, int size, c10::intrusive_ptr<c10d::Backend> over, std::string name)
      : Backend(rank, size), gloo(std::move(over)), stream(new_stream()), name(std::move(name)) {}
  static int64_t new_stream() {
    Lock lock(mu);
    return next_stream++;
  }
  int64_t stream_to(int peer) {
    if (peer < 0) return stream;
    auto it = pairs.find(peer);
    return it == pairs.end() ? pairs[peer] = new_stream() : it->second;
  }
  ~FakeNCCL() override { disconnect(); }
  void connect() {
    Lock lock(mu);
    if (is_connected) return;
    communicators[device]++;
    is_connected = true;
    note("group\t%s\t%d\t%d\t%d", name.c_str(), getRank(), getSize(), device);  // maybe another than when it was made
  }
  void disconnect() {
    Lock lock(mu);
    if (is_connected) communicators[device]--;
    is_connected = false;
  }
  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  void eagerConnectSingleDevice(at::Device to) override { device = to.index(); }
  void abort() override {
    *aborted = true;
    disconnect();
    if (device >= 0) {  // returns when the communicator's kernels have ended
      Lock lock(mu);
      host_has_waited(clocks[key_of(device, stream)]);
      for (auto& [_, own] : pairs) host_has_waited(clocks[key_of(device, own)]);
    }
    if (guarded) gloo->abort();
  }
  void shutdown() override { gloo->shutdown(); }

  void refuse(const std::string& text) {
    complain("collective", text);
    TORCH_CHECK(false, text);
  }
  void check(const std::string& what, const Tensor& tensor) {
    if (!tensor.is_cuda()) refuse(what + ": No backend type associated with device type cpu");
    if (!tensor.is_contiguous() && !tensor.is_non_overlapping_and_dense()) refuse(what + ": Tensors must be contiguous");
    auto type = tensor.scalar_type();
    if (type == kShort || type == kUInt16 || type == kUInt32) refuse(what + ": Unconvertible NCCL type " + c10::toString(type));
    if (device < 0) device = tensor.get_device();
    auto at = "cuda:" + std::to_string(tensor.get_device());
    if (device != tensor.get_device()) refuse(what + ": the communicator of cuda:" + std::to_string(device) + " was given a tensor on " + at);
    if (device != current_device) refuse(what + ": the current device is cuda:" + std::to_string(current_device) + ", the tensor's " + at);
  }
  static Tensor host(const Tensor& tensor) { return host_alias(tensor).clone(MemoryFormat::Contiguous); }

  WorkPtr begin(const char* what, Tensors reads, Tensors writes, const std::function<WorkPtr(StrictWork&)>& start, int peer = -1, bool sends = false) {
    TORCH_CHECK(guarded || !*aborted, "NCCL communicator was aborted on rank ", getRank(), ".");
    for (auto& tensor : reads) check(what, tensor);
    for (auto& tensor : writes) check(what, tensor);
    connect();
    settle(stream_now());
    int64_t id = stream_to(peer), own = key_of(device, id);
    settle(own);
    auto work = c10::make_intrusive<StrictWork>();
    {
      Lock lock(mu);
      fakecuda::merge(clocks[own], clocks[stream_now()]);
      tick(own);
      operation = what;
      counts["nccl"]++;
      op_counts[std::string("nccl ") + what]++;
      for (auto& tensor : reads) touch(tensor, false, own);
      for (auto& tensor : writes) touch(tensor, true, own);
      work->done = clocks[own];
      work->number = new_event();
      size_t read = 0, written = 0;
      for (auto& tensor : reads) read += tensor.nbytes();
      for (auto& tensor : writes) written += tensor.nbytes();
      note("join\t%lld\t%lld", (long long)own, (long long)stream_now());
      note("nccl\t%lld\t%llu\t%s\t%llu\t%s\t%zu\t%d", (long long)own, (unsigned long long)work->number, name.c_str(),
           (unsigned long long)numbers[{peer, sends}]++, what, std::max(read, written), peer);
    }
    work->guarded = guarded;
    work->what = what;
    work->rank = getRank();
    work->device = device;
    work->stream = id;
    work->aborted = aborted;
    work->keep = reads;
    try {
      work->inner = start(*work);
    } catch (const std::exception& error) {
      if (guarded && !*aborted) watchdog(getRank(), what, error.what());
      throw;
    }
    return work;
  }
  // In place on one tensor.
  WorkPtr in_place(const char* what, const Tensor& tensor, const std::function<WorkPtr(Tensors&)>& start, int peer = -1) {
    auto begun = [&](StrictWork& work) {
      Tensors own{host(tensor)};
      work.results.emplace_back(tensor, own[0]);
      return start(own);
    };
    return begin(what, {}, {tensor}, begun, peer);
  }
  // From one tensor into another.
  WorkPtr across(const char* what, const Tensor& to, const Tensor& from, const std::function<WorkPtr(Tensor&, Tensor&)>& start) {
    return begin(what, {from}, {to}, [&](StrictWork& work) {
      Tensor out = host(to), in = host(from);
      work.results.emplace_back(to, out);
      work.keep.push_back(in);
      return start(out, in);
    });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return in_place("allreduce", tensors[0], [&](Tensors& own) { return gloo->allreduce(own, options); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return in_place("broadcast", tensors[0], [&](Tensors& own) { return gloo->broadcast(own, options); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return in_place("reduce", tensors[0], [&](Tensors& own) { return gloo->reduce(own, options); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return in_place("recv", tensors[0], [&](Tensors& own) { return gloo->recv(own, from, tag); }, from);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto begun = [&](StrictWork& work) {
      Tensors own{host(tensors[0])};
      work.keep.push_back(own[0]);
      return gloo->send(own, to, tag);
    };
    return begin("send", {tensors[0]}, {}, begun, to, true);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return begin("allgather", inputs, outputs[0], [&](StrictWork& work) {
      std::vector<Tensors> out(1);
      for (auto& tensor : outputs[0]) {
        out[0].push_back(host(tensor));
        work.results.emplace_back(tensor, out[0].back());
      }
      Tensors in{host(inputs[0])};
      work.keep.push_back(in[0]);
      return gloo->allgather(out, in, options);
    });
  }
  WorkPtr _allgather_base(Tensor& to, Tensor& from, const c10d::AllgatherOptions& options) override {
    return across("allgather", to, from, [&](Tensor& out, Tensor& in) { return gloo->_allgather_base(out, in, options); });
  }
  WorkPtr _reduce_scatter_base(Tensor& to, Tensor& from, const c10d::ReduceScatterOptions& options) override {
    return across("reduce_scatter", to, from, [&](Tensor& out, Tensor& in) { return gloo->_reduce_scatter_base(out, in, options); });
  }
  WorkPtr alltoall_base(
      Tensor& to, Tensor& from, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& options) override {
    return across("alltoall", to, from, [&](Tensor& out, Tensor& in) { return gloo->alltoall_base(out, in, out_sizes, in_sizes, options); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    note("barrier\t%s\t%llu", name.c_str(), (unsigned long long)numbers[{-2, false}]++);
    return gloo->barrier(options);
  }
};

}  // namespace fakecuda
