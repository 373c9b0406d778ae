// Gloo with device tensors, as a CUDA build of torch has it: through the host, for an all-reduce and
// a broadcast alone. A CPU build's own gloo does not check, and crashes.
#pragma once
#include "nccl.hpp"

namespace fakecuda {

struct StagedWork final : c10d::Work {
  WorkPtr inner;
  Tensor device, host;
  std::mutex landing;
  bool landed = false;

  bool isCompleted() override { return inner->isCompleted(); }
  // Holds the host, as gloo does; then the result is copied on the stream of who waits.
  bool wait(std::chrono::milliseconds limit) override {
    std::lock_guard<std::mutex> lock(landing);
    if (landed) return true;
    inner->wait(limit);
    at::NoGradGuard no_grad;
    device.copy_(host);
    landed = true;
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner->getFuture(); }
  std::vector<Tensor> result() override { return {device}; }
};

struct StagedGloo final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;

  explicit StagedGloo(c10::intrusive_ptr<c10d::Backend> over) : Backend(over->getRank(), over->getSize()), gloo(std::move(over)) {}
  const std::string getBackendName() const override { return "gloo"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  WorkPtr staged(const char* what, const Tensor& tensor, const std::function<WorkPtr(Tensors&)>& start) {
    host_waits_for(stream_now());
    auto work = c10::make_intrusive<StagedWork>();
    {
      Lock lock(mu);
      operation = what;
      touch(tensor, false, stream_now());
    }
    work->device = tensor;
    work->host = FakeNCCL::host(tensor);
    Tensors own{work->host};
    work->inner = start(own);
    return work;
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return staged("gloo allreduce", tensors[0], [&](Tensors& own) { return gloo->allreduce(own, options); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return staged("gloo broadcast", tensors[0], [&](Tensors& own) { return gloo->broadcast(own, options); });
  }
};

}  // namespace fakecuda
