// What a process asks of its devices, in order, a line each: timeline.py gives it times.
//
// A file per process in the folder FAKECUDA_TIMELINE, written at once, since the process may be
// killed. Fields are separated by tabs; streams and events are numbers:
//   op ID SIGNATURE             an operator with the shapes of its arguments, from now on ID
//   kernel STREAM ID            such an operator on a stream
//   copy STREAM KIND BYTES      KIND is h2d, d2h or kernel
//   record STREAM EVENT         the event is where the stream is now
//   wait STREAM EVENT           the stream goes on after the event
//   host EVENT|-STREAM          the host goes on after the event, or after all that the stream has
//   join STREAM OTHER           the stream goes on after all that the other has
//   nccl STREAM EVENT GROUP NUMBER KIND BYTES PEER    the event is its end
//   mark STREAM NAME            where the stream is when the program says NAME
//   group, device               facts, from Python (cuda.py)
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <unistd.h>
#include <unordered_map>

namespace fakecuda {

inline std::FILE* timeline_file() {
  static std::FILE* file = nullptr;
  static pid_t opened_by = 0;
  if (opened_by == getpid()) return file;  // a fork has a file of its own
  opened_by = getpid();
  const char* folder = std::getenv("FAKECUDA_TIMELINE");
  file = folder && *folder ? std::fopen((std::string(folder) + "/process-" + std::to_string(getpid())).c_str(), "a") : nullptr;
  if (file) std::setvbuf(file, nullptr, _IOLBF, 1 << 16);
  return file;
}

inline void note(const char* format, ...) {
  std::FILE* file = timeline_file();
  if (!file) return;
  va_list values;
  va_start(values, format);
  std::vfprintf(file, format, values);
  va_end(values);
  std::fputc('\n', file);
}

inline uint64_t new_event() {
  static uint64_t last = 0;
  return ++last;
}

// The number of an operator with its shapes, which are written the first time.
inline int number_of(const std::string& signature) {
  static std::unordered_map<std::string, int> known;
  static pid_t known_by = 0;
  if (known_by != getpid()) known.clear();
  known_by = getpid();
  auto [it, is_new] = known.emplace(signature, (int)known.size());
  if (is_new) note("op\t%d\t%s", it->second, signature.c_str());
  return it->second;
}

}  // namespace fakecuda
