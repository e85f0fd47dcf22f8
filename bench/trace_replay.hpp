// Replays the KV transfers of a recorded trace against a connected target.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <kvferry/actors/benchmark.hpp>
#include <kvferry/actors/engine.hpp>

#include "bench/control.hpp"
#include "bench/latency_stats.hpp"
#include "bench/options.hpp"
#include "bench/trace.hpp"
#include "bench/trace_plan.hpp"

namespace kvferry::bench {

/// Share of the time to first token that a transfer should stay under.
inline constexpr double ttft_share = 0.05;

struct TraceResult {
  TraceOptions options;
  std::string transport;
  std::uint64_t requests = 0;      ///< replayed
  std::uint64_t fully_cached = 0;  ///< of them, those that had nothing to move
  std::uint64_t bytes = 0;         ///< moved
  std::uint64_t bytes_skipped = 0;
  std::uint64_t under_budget = 0;  ///< requests whose transfer stayed under ttft_share
  double max_lag_ms = 0;           ///< how late a request began at worst
  LatencyStats latency;            ///< of the requests that moved something
  std::optional<bool> verified;
  std::string mismatch;

  double skipped_share() const noexcept {
    const double all = static_cast<double>(bytes) + static_cast<double>(bytes_skipped);
    return all > 0 ? static_cast<double>(bytes_skipped) / all : 0;
  }
  double share_under_budget() const noexcept {
    return requests > 0 ? static_cast<double>(under_budget) / static_cast<double>(requests) : 0;
  }
  double mib_per_s() const noexcept {
    const double seconds = latency.sum_seconds();
    return seconds > 0 ? static_cast<double>(bytes) / seconds / (1 << 20) : 0;
  }
};

/// The decode side is this process: it reads from the target what it does not hold. One request after
/// the other, one a step, for a benchmark actor; a request's latency goes from its submission to the
/// return of wait(). With options.verify every block of every request is checked, outside of that time.
class TraceReplay : public BenchmarkJob {
 public:
  /// Allocates and fills both pools. Everything referred to must outlive the replay; once `stop` is set
  /// the present request is the last.
  static Result<std::unique_ptr<TraceReplay>> create(Engine& engine, ControlClient& control,
                                                     const BenchOptions& options,
                                                     const std::vector<TraceRequest>& requests,
                                                     const std::atomic<bool>& stop);

  /// Told before every request.
  void on_progress(std::function<void(std::uint64_t request, std::uint64_t requests)> progress) {
    progress_ = std::move(progress);
  }

  /// Waits until the next request's time has come (0.5 s at most), then replays it. False after the last.
  Result<bool> step() override;

  TraceResult result() const;

 private:
  TraceReplay(Engine& engine, ControlClient& control, const BenchOptions& options,
              const std::vector<TraceRequest>& requests, const std::atomic<bool>& stop);

  Status prepare();
  Status touch_everything();
  bool over() const;
  double elapsed_seconds() const;
  double due_seconds(const TraceRequest& request) const;
  Status serve(const TraceRequest& request);
  Result<Duration> transfer(const std::vector<PageMove>& moves);
  void poison_blocks(const std::vector<Slice>& slices);
  void check(const std::vector<Slice>& slices);
  void account(const TraceRequest& request, const RequestPlan& plan, Duration taken);

  Engine& engine_;
  ControlClient& control_;
  const std::vector<TraceRequest>& requests_;
  const std::atomic<bool>& stop_;
  bool verify_;
  std::uint64_t seed_;
  KvPool prefill_;
  KvPool decode_;
  TracePlanner planner_;
  std::function<void(std::uint64_t, std::uint64_t)> progress_;
  Region local_;
  RemoteHandle remote_;
  std::optional<TimePoint> begin_;  ///< of the first request
  std::size_t next_ = 0;
  TraceResult result_;
};

}  // namespace kvferry::bench
