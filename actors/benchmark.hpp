// The benchmark actor: runs a measurement in steps on a thread of its own, so that it can be watched
// and stopped from outside between two steps.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <kvferry/runtime/status.hpp>
#include <kvferry/runtime/transfer.hpp>

namespace kvferry {

/// What a benchmark actor runs. All calls come from its thread.
class BenchmarkJob {
 public:
  virtual ~BenchmarkJob() = default;
  /// One bounded piece of work; false when it was the last, an error ends the job.
  virtual Result<bool> step() = 0;
};

/// Owns one benchmark actor. Calls from one thread, except stop().
class BenchmarkActorHandle {
 public:
  /// Starts at once; `job` must outlive this object.
  explicit BenchmarkActorHandle(BenchmarkJob& job);
  /// Stops after the present step and waits for it.
  ~BenchmarkActorHandle();
  BenchmarkActorHandle(const BenchmarkActorHandle&) = delete;
  BenchmarkActorHandle& operator=(const BenchmarkActorHandle&) = delete;

  /// Ends the job after the present step. Any thread.
  void stop();
  /// The job's outcome: ok after its last step, its error, or cancelled. timed_out when it still runs
  /// after `limit`: it goes on and may be waited for again.
  Status wait(Duration limit);
  /// Steps done so far.
  std::uint64_t steps() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry
