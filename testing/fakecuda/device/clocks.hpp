// Streams and events as vector clocks: what has not waited for what it touches is a race.
#pragma once
#include "timeline.hpp"

#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <unistd.h>

namespace fakecuda {

using Clock = std::map<int64_t, uint64_t>;  // stream -> how far it is known to have come
constexpr int64_t kHost = -1;

// Never destroyed: tensors are freed until the very end of a process.
inline auto& mu = *new std::recursive_mutex;
inline auto& clocks = *new std::map<int64_t, Clock>;
inline auto& counts = *new std::map<std::string, uint64_t>;
inline auto& op_counts = *new std::map<std::string, uint64_t>;
inline thread_local int current_device = 0;
inline thread_local std::map<int, int64_t> current_streams;
inline thread_local const char* operation = "";  // what runs, for reports
inline thread_local int in_fallback = 0;
inline int64_t next_stream = 1;

using Lock = std::lock_guard<std::recursive_mutex>;

inline int64_t key_of(int device, int64_t id) { return device * 100000 + id; }
inline int device_of(int64_t key) { return key / 100000; }
inline int64_t current_stream(int device) {
  auto it = current_streams.find(device);
  return it == current_streams.end() ? 0 : it->second;
}
inline int64_t stream_now() { return key_of(current_device, current_stream(current_device)); }

inline void merge(Clock& into, const Clock& from) {
  for (auto& [stream, time] : from)
    if (into[stream] < time) into[stream] = time;
}

// Faults are written at once, since the process may be killed: one line each, once a kind.
inline void complain(const std::string& kind, const std::string& text) {
  static std::map<std::string, int> said;
  const char* folder = std::getenv("FAKECUDA_FAULTS");
  if (said[text]++ || said.size() > 200 || folder == nullptr) return;
  std::string path = std::string(folder) + "/faults-" + std::to_string(getpid());
  if (FILE* file = std::fopen(path.c_str(), "a")) {
    std::fprintf(file, "%s: %s\n", kind.c_str(), text.c_str());
    std::fclose(file);
  }
}

// A copy to pinned memory happens when the host has waited for it, or a stream that copies from
// there; before, they read poison.
struct LateCopy {
  int64_t stream;
  uint64_t time;
  const void* memory;
  std::function<void()> copy;
};
inline auto& late_copies = *new std::list<LateCopy>;

inline void land_copies(Clock& reader, const void* memory = nullptr) {
  for (auto it = late_copies.begin(); it != late_copies.end();) {
    if (reader[it->stream] < it->time || (memory && memory != it->memory)) {
      ++it;
      continue;
    }
    auto copy = std::move(it->copy);
    it = late_copies.erase(it);
    copy();
  }
}
inline void host_has_waited(const Clock& clock) {
  merge(clocks[kHost], clock);
  land_copies(clocks[kHost]);
}

// Collectives that a stream waits for. The host meets them only when it runs something on the
// stream, as it meets NCCL's only when it synchronises.
using Works = std::list<c10::intrusive_ptr<c10d::Work>>;
inline auto& awaited = *new std::map<int64_t, Works>;

inline void land(Works works) {
  for (auto& work : works) work->synchronize();
}
inline void settle(int64_t stream) {
  Works works;
  {
    Lock lock(mu);
    works.swap(awaited[stream]);
  }
  if (works.empty()) return;
  if (PyGILState_Check()) {
    pybind11::gil_scoped_release release;
    land(std::move(works));
  } else {
    land(std::move(works));
  }
}

inline uint64_t tick(int64_t stream) {
  merge(clocks[stream], clocks[kHost]);
  return ++clocks[stream][stream];
}
inline void host_waits_for(int64_t stream) {
  settle(stream);
  Lock lock(mu);
  counts["host_sync"]++;
  note("host\t-%lld", (long long)stream);
  host_has_waited(clocks[stream]);
}

}  // namespace fakecuda
