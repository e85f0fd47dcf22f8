// Replays the KV transfers of a recorded trace against a connected target.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include <kvferry/actors/engine.hpp>

#include "bench/control.hpp"
#include "bench/latency_stats.hpp"
#include "bench/options.hpp"
#include "bench/trace.hpp"

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

/// Told before every request.
using TraceProgress = std::function<void(std::uint64_t request, std::uint64_t requests)>;

/// The decode side is this process: it reads from the target what it does not hold. One request after
/// the other; a request's latency goes from its submission to the return of wait(). With options.verify
/// every block of every request is checked, outside of that time.
Result<TraceResult> replay_trace(Engine& engine, ControlClient& control, const BenchOptions& options,
                                 const std::vector<TraceRequest>& requests, const std::atomic<bool>& stop,
                                 const TraceProgress& progress);

}  // namespace kvferry::bench
